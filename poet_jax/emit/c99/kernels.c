/* Kernels of planned training steps; see kernels.h. */
#include "kernels.h"

/* Count up `at` within `count`, the last one fastest; 0 after the last place. */
static int next_place(int32_t *at, const int32_t *count, int32_t loops) {
  for (int32_t axis = loops - 1; axis >= 0; --axis) {
    if (++at[axis] < count[axis]) return 1;
    at[axis] = 0;
  }
  return 0;
}

static int32_t place(const int32_t *at, const int32_t *step, int32_t loops) {
  int32_t sum = 0;
  for (int32_t axis = 0; axis < loops; ++axis) sum += at[axis] * step[axis];
  return sum;
}

static void product(float *out, const float *a, const float *b,
                    const struct poet_dot *t) {
  const int32_t terms = t->terms, a_term = t->a_term, b_term = t->b_term;
  const int32_t next = t->b_column;
  for (int32_t row = 0; row < t->rows; ++row) {
    const float *x = a + row * t->a_row;
    int32_t column = 0;
    for (; column + 4 <= t->columns; column += 4) {
      const float *y = b + column * next;
      float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
      for (int32_t k = 0; k < terms; ++k) {
        const float factor = x[k * a_term], *z = y + k * b_term;
        s0 += factor * z[0];
        s1 += factor * z[next];
        s2 += factor * z[2 * next];
        s3 += factor * z[3 * next];
      }
      float *o = out + row * t->out_row + column * t->out_column;
      const float sums[4] = {s0, s1, s2, s3};
      for (int32_t k = 0; k < 4; ++k) {
        const float before = t->adds ? o[k * t->out_column] : 0.0f;
        o[k * t->out_column] = before + sums[k];
      }
    }
    for (; column < t->columns; ++column) {
      const float *y = b + column * next;
      float *o = out + row * t->out_row + column * t->out_column;
      float s = 0.0f;
      for (int32_t k = 0; k < terms; ++k) s += x[k * a_term] * y[k * b_term];
      *o = (t->adds ? *o : 0.0f) + s;
    }
  }
}

void poet_dot(float *out, const float *a, const float *b, const struct poet_dot *t) {
  int32_t at[POET_LOOPS] = {0};
  if (t->adds) memset(out, 0, (size_t)t->size * sizeof *out);
  do {
    product(out + place(at, t->out_step, t->loops), a + place(at, t->a_step, t->loops),
            b + place(at, t->b_step, t->loops), t);
  } while (next_place(at, t->count, t->loops));
}

/* Up to four features of one pixel, whose windows begin at row y and column x. */
static void pixel(float *out, const float *in, const float *w, int32_t features,
                  int32_t y, int32_t x, const struct poet_convolution *t) {
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int32_t i = 0; i < t->window[0]; ++i) {
    int32_t row = y + i * t->window_dilation[0];
    if (row < 0 || row % t->in_dilation[0]) continue;
    row /= t->in_dilation[0];
    if (row >= t->in_size[0]) continue;
    for (int32_t j = 0; j < t->window[1]; ++j) {
      int32_t column = x + j * t->window_dilation[1];
      if (column < 0 || column % t->in_dilation[1]) continue;
      column /= t->in_dilation[1];
      if (column >= t->in_size[1]) continue;
      const float *a = in + row * t->in_step[0] + column * t->in_step[1];
      const float *b = w + i * t->w_step[0] + j * t->w_step[1];
      if (features == 4) {
        for (int32_t k = 0; k < t->terms; ++k) {
          const float factor = a[k * t->in_term], *c = b + k * t->w_term;
          s[0] += factor * c[0];
          s[1] += factor * c[t->w_out];
          s[2] += factor * c[2 * t->w_out];
          s[3] += factor * c[3 * t->w_out];
        }
      } else {
        for (int32_t f = 0; f < features; ++f)
          for (int32_t k = 0; k < t->terms; ++k)
            s[f] += a[k * t->in_term] * b[k * t->w_term + f * t->w_out];
      }
    }
  }
  for (int32_t f = 0; f < features; ++f) out[f * t->out_feature] = s[f];
}

void poet_convolution(float *out, const float *in, const float *w,
                      const struct poet_convolution *t) {
  for (int32_t n = 0; n < t->batch; ++n)
    for (int32_t group = 0; group < t->groups; ++group)
      for (int32_t row = 0; row < t->out_size[0]; ++row)
        for (int32_t column = 0; column < t->out_size[1]; ++column)
          for (int32_t f = 0; f < t->outs; f += 4) {
            const int32_t feature = group * t->outs + f;
            const int32_t left = t->outs - f;
            pixel(out + n * t->out_batch + feature * t->out_feature +
                      row * t->out_step[0] + column * t->out_step[1],
                  in + n * t->in_batch + group * t->in_group, w + feature * t->w_out,
                  left < 4 ? left : 4, row * t->stride[0] - t->low[0],
                  column * t->stride[1] - t->low[1], t);
          }
}

/* The element of an array that is at `tap` of the window at `at`; -1 outside. */
static int32_t under(const int32_t *at, const int32_t *tap,
                     const struct poet_window *t) {
  int32_t sum = 0;
  for (int32_t axis = 0; axis < t->rank; ++axis) {
    const int32_t i = at[axis] * t->stride[axis] - t->low[axis] +
                      tap[axis] * t->window_dilation[axis];
    if (i < 0 || i % t->in_dilation[axis]) return -1;
    if (i / t->in_dilation[axis] >= t->in_size[axis]) return -1;
    sum = sum * t->in_size[axis] + i / t->in_dilation[axis];
  }
  return sum;
}

#define WINDOW(NAME, FIRST, COMBINE)                                             \
  void NAME(float *out, const float *in, const struct poet_window *t) {          \
    int32_t at[POET_LOOPS] = {0};                                                \
    do {                                                                         \
      int32_t tap[POET_LOOPS] = {0};                                             \
      float s = FIRST;                                                           \
      do {                                                                       \
        const int32_t i = under(at, tap, t);                                     \
        if (i >= 0) s = COMBINE;                                                 \
      } while (next_place(tap, t->window, t->rank));                             \
      *out++ = s;                                                                \
    } while (next_place(at, t->out_size, t->rank));                              \
  }

WINDOW(poet_window_sum, 0.0f, s + in[i])
WINDOW(poet_window_max, -poet_infinity(), poet_max(s, in[i]))
WINDOW(poet_window_min, poet_infinity(), poet_min(s, in[i]))

/* Add each element of `source` to the place of the first extreme under its window. */
#define SCATTER(NAME, BETTER)                                                    \
  void NAME(float *out, const float *source, const float *in,                    \
            const struct poet_window *t) {                                       \
    int32_t at[POET_LOOPS] = {0}, size = 1;                                      \
    for (int32_t axis = 0; axis < t->rank; ++axis) size *= t->in_size[axis];     \
    memset(out, 0, (size_t)size * sizeof *out);                                  \
    do {                                                                         \
      int32_t tap[POET_LOOPS] = {0}, best = -1;                                  \
      do {                                                                       \
        const int32_t i = under(at, tap, t);                                     \
        if (i >= 0 && (best < 0 || in[i] BETTER in[best])) best = i;             \
      } while (next_place(tap, t->window, t->rank));                             \
      if (best >= 0) out[best] += *source;                                       \
      ++source;                                                                  \
    } while (next_place(at, t->out_size, t->rank));                              \
  }

SCATTER(poet_scatter_max, >)
SCATTER(poet_scatter_min, <)

/* The start of the slice at a place; -1 for one that is not inside the array. */
static int32_t start_of(const int32_t *at, const struct poet_slices *t) {
  int32_t sum = 0;
  for (int32_t axis = 0; axis < t->starts; ++axis) {
    int32_t start = at[axis * t->at_start];
    const int32_t limit = t->limit[axis];
    if (start < 0 || start > limit) {
      if (!t->clips) return -1;
      start = start < 0 && !t->is_unsigned ? 0 : limit;
    }
    sum += start * t->array_start[axis];
  }
  return sum;
}

void poet_gather(void *packed, const void *array, const int32_t *at, const void *fill,
                 const struct poet_slices *t) {
  int32_t batch[POET_LOOPS] = {0};
  const size_t itemsize = (size_t)t->itemsize;
  do {
    int32_t window[POET_LOOPS] = {0};
    const int32_t start = start_of(at + place(batch, t->at_batch, t->batch_loops), t);
    const int32_t from = start + place(batch, t->array_batch, t->batch_loops);
    const int32_t to = place(batch, t->packed_batch, t->batch_loops);
    do {
      const int32_t i = from + place(window, t->array_window, t->window_loops);
      const int32_t o = to + place(window, t->packed_window, t->window_loops);
      memcpy((uint8_t *)packed + (size_t)o * itemsize,
             start < 0 ? (const uint8_t *)fill
                       : (const uint8_t *)array + (size_t)i * itemsize,
             itemsize);
    } while (next_place(window, t->window, t->window_loops));
  } while (next_place(batch, t->batch, t->batch_loops));
}

void poet_scatter(void *array, const void *packed, const int32_t *at,
                  void (*combine)(void *, const void *), const struct poet_slices *t) {
  int32_t batch[POET_LOOPS] = {0};
  const size_t itemsize = (size_t)t->itemsize;
  do {
    int32_t window[POET_LOOPS] = {0};
    const int32_t start = start_of(at + place(batch, t->at_batch, t->batch_loops), t);
    if (start < 0) continue;
    const int32_t to = start + place(batch, t->array_batch, t->batch_loops);
    const int32_t from = place(batch, t->packed_batch, t->batch_loops);
    do {
      const int32_t o = to + place(window, t->array_window, t->window_loops);
      const int32_t i = from + place(window, t->packed_window, t->window_loops);
      combine((uint8_t *)array + (size_t)o * itemsize,
              (const uint8_t *)packed + (size_t)i * itemsize);
    } while (next_place(window, t->window, t->window_loops));
  } while (next_place(batch, t->batch, t->batch_loops));
}

void poet_combine_add_f(void *a, const void *b) { *(float *)a += *(const float *)b; }
void poet_combine_mul_f(void *a, const void *b) { *(float *)a *= *(const float *)b; }
void poet_combine_max_f(void *a, const void *b) {
  *(float *)a = poet_max(*(float *)a, *(const float *)b);
}
void poet_combine_min_f(void *a, const void *b) {
  *(float *)a = poet_min(*(float *)a, *(const float *)b);
}
void poet_combine_add_i(void *a, const void *b) {
  *(uint32_t *)a += *(const uint32_t *)b;
}
void poet_combine_set(void *a, const void *b) { memcpy(a, b, 4); }
void poet_combine_set_bytes(void *a, const void *b) { memcpy(a, b, 1); }

/* Threefry 2x32 of 20 rounds (Salmon et al., SC 2011), of a counter in x and y. */
void poet_threefry(uint32_t *x, uint32_t *y, uint32_t key0, uint32_t key1) {
  static const uint8_t rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1bd11bdau};
  uint32_t a = *x + key0, b = *y + key1;
  for (uint32_t block = 0; block < 5; ++block) {
    for (uint32_t round = 0; round < 4; ++round) {
      const uint32_t by = rotations[block & 1u][round];
      a += b;
      b = ((b << by) | (b >> (32u - by))) ^ a;
    }
    a += keys[(block + 1u) % 3u];
    b += keys[(block + 2u) % 3u] + block + 1u;
  }
  *x = a;
  *y = b;
}
