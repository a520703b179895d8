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

/* Write four elements of a row of a product, or add to them. */
static void put_4(float *o, int32_t next, int32_t adds, float s0, float s1, float s2,
                  float s3) {
  if (adds) {
    s0 = o[0] + s0;
    s1 = o[next] + s1;
    s2 = o[2 * next] + s2;
    s3 = o[3 * next] + s3;
  }
  o[0] = s0;
  o[next] = s1;
  o[2 * next] = s2;
  o[3 * next] = s3;
}

/* Four floats, which a multiple of four others is added to, and each of them: a vector
   where the processor has some for any float. A compiler makes none by itself of sums
   whose order matters. */
#if defined(__GNUC__) && (defined(__SSE__) || defined(__aarch64__))
typedef float four __attribute__((vector_size(16)));
#define FOUR(name, w, x, y, z) four name = {w, x, y, z}
#define ADD_FOUR(s, factor, y) (s += (factor) * y)
#define EACH(s) s[0], s[1], s[2], s[3]
#else
#define FOUR(name, w, x, y, z) float name##0 = w, name##1 = x, name##2 = y, name##3 = z
#define ADD_FOUR(s, factor, y)                       \
  (s##0 += (factor) * y##0, s##1 += (factor) * y##1, \
   s##2 += (factor) * y##2, s##3 += (factor) * y##3)
#define EACH(s) s##0, s##1, s##2, s##3
#endif

/* Four rows and four columns: what is read takes part in four products each. Those of
   `b` are neighbours, or not. */
#define PRODUCT_4_4(name, at_1, at_2, at_3)                                       \
  static void name(float *out, const float *a, const float *b,                    \
                   const struct poet_dot *t) {                                    \
    const int32_t a_term = t->a_term, b_term = t->b_term, terms = t->terms;       \
    const int32_t column = t->b_column;                                           \
    const float *x0 = a, *x1 = x0 + t->a_row, *x2 = x1 + t->a_row,                \
                *x3 = x2 + t->a_row;                                              \
    FOUR(p, 0.0f, 0.0f, 0.0f, 0.0f);                                              \
    FOUR(q, 0.0f, 0.0f, 0.0f, 0.0f);                                              \
    FOUR(r, 0.0f, 0.0f, 0.0f, 0.0f);                                              \
    FOUR(s, 0.0f, 0.0f, 0.0f, 0.0f);                                              \
    (void)column;                                                                 \
    for (int32_t k = terms; k > 0; --k) {                                         \
      const FOUR(y, b[0], b[at_1], b[at_2], b[at_3]);                             \
      ADD_FOUR(p, *x0, y), ADD_FOUR(q, *x1, y);                                   \
      ADD_FOUR(r, *x2, y), ADD_FOUR(s, *x3, y);                                   \
      x0 += a_term, x1 += a_term, x2 += a_term, x3 += a_term, b += b_term;        \
    }                                                                             \
    put_4(out, t->out_column, t->adds, EACH(p));                                  \
    put_4(out + t->out_row, t->out_column, t->adds, EACH(q));                     \
    put_4(out + 2 * t->out_row, t->out_column, t->adds, EACH(r));                 \
    put_4(out + 3 * t->out_row, t->out_column, t->adds, EACH(s));                 \
  }
PRODUCT_4_4(product_of_neighbours, 1, 2, 3)
PRODUCT_4_4(product_4_4, column, 2 * column, 3 * column)

static void product_1_4(float *out, const float *a, const float *b,
                        const struct poet_dot *t) {
  const int32_t terms = t->terms, next = t->b_column;
  float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
  for (int32_t k = 0; k < terms; ++k) {
    const float factor = *a;
    s0 += factor * b[0];
    s1 += factor * b[next];
    s2 += factor * b[2 * next];
    s3 += factor * b[3 * next];
    a += t->a_term, b += t->b_term;
  }
  put_4(out, t->out_column, t->adds, s0, s1, s2, s3);
}

static void product_1_1(float *out, const float *a, const float *b,
                        const struct poet_dot *t) {
  const int32_t terms = t->terms, a_term = t->a_term, b_term = t->b_term;
  float s = 0.0f;
  for (int32_t k = 0; k < terms; ++k) s += a[k * a_term] * b[k * b_term];
  *out = (t->adds ? *out : 0.0f) + s;
}

static void product(float *out, const float *a, const float *b,
                    const struct poet_dot *t) {
  for (int32_t row = 0, rows; row < t->rows; row += rows) {
    rows = row + 4 <= t->rows ? 4 : 1;
    const float *x = a + row * t->a_row;
    float *o = out + row * t->out_row;
    int32_t column = 0;
    for (; column + 4 <= t->columns; column += 4) {
      const float *y = b + column * t->b_column;
      float *to = o + column * t->out_column;
      if (rows == 1)
        product_1_4(to, x, y, t);
      else if (t->b_column == 1)
        product_of_neighbours(to, x, y, t);
      else
        product_4_4(to, x, y, t);
    }
    for (; column < t->columns; ++column)
      for (int32_t k = 0; k < rows; ++k)
        product_1_1(o + k * t->out_row + column * t->out_column, x + k * t->a_row,
                    b + column * t->b_column, t);
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

/* The taps of a window that begins at `start` which lie on elements, not between them
   or outside: the first one, and how many there are, each `every` taps apart. */
struct taps {
  int32_t first, count;
};

static struct taps taps_on(int32_t start, int axis, const struct poet_convolution *t) {
  const int32_t step = t->window_dilation[axis], apart = t->in_dilation[axis];
  const int32_t room = (t->in_size[axis] - 1) * apart - start;
  struct taps found = {start < 0 ? (step - 1 - start) / step : 0, 0};
  const int32_t limit = found.first + t->every[axis];
  if (apart > 1)
    while (found.first < limit && (start + found.first * step) % apart) ++found.first;
  if (room < 0 || found.first >= limit) return found;
  const int32_t last = poet_min_i(room / step, t->window[axis] - 1);
  if (last >= found.first) found.count = (last - found.first) / t->every[axis] + 1;
  return found;
}

/* s[f] += the sum over n terms of a * b, for up to four features f. */
static void add_products(float *s, const float *a, const float *b, int32_t features,
                         int32_t n, int32_t a_step, int32_t b_step, int32_t next) {
  if (features == 4) {
    float s0 = s[0], s1 = s[1], s2 = s[2], s3 = s[3];
    for (int32_t k = 0; k < n; ++k) {
      const float factor = a[k * a_step], *c = b + k * b_step;
      s0 += factor * c[0];
      s1 += factor * c[next];
      s2 += factor * c[2 * next];
      s3 += factor * c[3 * next];
    }
    s[0] = s0, s[1] = s1, s[2] = s2, s[3] = s3;
    return;
  }
  for (int32_t f = 0; f < features; ++f) {
    float sum = s[f];
    for (int32_t k = 0; k < n; ++k) sum += a[k * a_step] * b[k * b_step + f * next];
    s[f] = sum;
  }
}

/* Up to four features of one pixel. */
static void pixel(float *out, const float *in, const float *w, int32_t features,
                  struct taps rows, struct taps columns,
                  const struct poet_convolution *t) {
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const int32_t w_next = t->every[1] * t->w_step[1];
  for (int32_t i = 0; i < rows.count; ++i) {
    const float *a = in + i * t->in_next[0], *b = w + i * t->every[0] * t->w_step[0];
    if (t->terms >= columns.count) {
      for (int32_t j = 0; j < columns.count; ++j)
        add_products(s, a + j * t->in_next[1], b + j * w_next, features, t->terms,
                     t->in_term, t->w_term, t->w_out);
    } else {
      for (int32_t k = 0; k < t->terms; ++k)
        add_products(s, a + k * t->in_term, b + k * t->w_term, features, columns.count,
                     t->in_next[1], w_next, t->w_out);
    }
  }
  for (int32_t f = 0; f < features; ++f) out[f * t->out_feature] = s[f];
}

/* The features of one pixel in all groups. */
static void features_at(float *out, const float *in, const float *w, struct taps rows,
                        struct taps columns, const struct poet_convolution *t) {
  for (int32_t group = 0; group < t->groups; ++group)
    for (int32_t f = 0; f < t->outs; f += 4) {
      const int32_t feature = group * t->outs + f;
      pixel(out + feature * t->out_feature, in + group * t->in_group,
            w + feature * t->w_out, poet_min_i(t->outs - f, 4), rows, columns, t);
    }
}

void poet_convolution(float *out, const float *in, const float *w,
                      const struct poet_convolution *t) {
  for (int32_t row = 0; row < t->out_size[0]; ++row) {
    const int32_t y = row * t->stride[0] - t->low[0];
    const struct taps rows = taps_on(y, 0, t);
    for (int32_t column = 0; column < t->out_size[1]; ++column) {
      const int32_t x = column * t->stride[1] - t->low[1];
      const struct taps columns = taps_on(x, 1, t);
      const int empty = !rows.count || !columns.count;
      const int32_t first[2] = {y + rows.first * t->window_dilation[0],
                                x + columns.first * t->window_dilation[1]};
      const int32_t from = empty ? 0
                                 : first[0] / t->in_dilation[0] * t->in_step[0] +
                                       first[1] / t->in_dilation[1] * t->in_step[1];
      const int32_t tap = empty ? 0
                                : rows.first * t->w_step[0] +
                                      columns.first * t->w_step[1];
      const int32_t to = row * t->out_step[0] + column * t->out_step[1];
      for (int32_t n = 0; n < t->batch; ++n)
        features_at(out + n * t->out_batch + to, in + n * t->in_batch + from, w + tap,
                    rows, columns, t);
    }
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

/* Of a stable merge sort each pass merges neighbours of a width into the second half of
   `order`, and moves them back. */
void poet_order(int32_t *order, int32_t count, const void *keys, int32_t step,
                uint32_t (*rank)(const void *, int32_t)) {
  int32_t *const merged = order + count;
  for (int32_t width = 1; width < count; width *= 2) {
    for (int32_t start = 0; start < count; start += 2 * width) {
      const int32_t middle = poet_min_i(start + width, count);
      const int32_t end = poet_min_i(middle + width, count);
      int32_t a = start, b = middle;
      for (int32_t i = start; i < end; ++i) {
        const int takes_first =
            b == end ||
            (a < middle && rank(keys, order[a] * step) <= rank(keys, order[b] * step));
        merged[i] = takes_first ? order[a++] : order[b++];
      }
    }
    memcpy(order, merged, (size_t)count * sizeof *order);
  }
}

uint32_t poet_rank_total(const void *keys, int32_t at) {
  const uint32_t bits = poet_bits(((const float *)keys)[at]);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

uint32_t poet_rank_float(const void *keys, int32_t at) {
  const float x = ((const float *)keys)[at];
  if (x != x) return ~0u;
  return x == 0.0f ? 0x80000000u : poet_rank_total(keys, at);
}

#define POET_RANK(type, lowest)                                  \
  uint32_t poet_rank_##type(const void *keys, int32_t at) {      \
    return (uint32_t)((const type##_t *)keys)[at] ^ lowest;      \
  }
POET_RANK(int32, 0x80000000u)
POET_RANK(int16, 0x80000000u)
POET_RANK(int8, 0x80000000u)
POET_RANK(uint32, 0u)
POET_RANK(uint16, 0u)
POET_RANK(uint8, 0u)
