/* Kernels of planned training steps: plain C99, without memory of their own. */
#ifndef POET_KERNELS_H
#define POET_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define POET_LOOPS 8

/* out[r, c] = sum over t of a[r, t] * b[t, c], in `loops` more loops. Numbers are
   strides in elements but for counts; with `adds` loops may add to one element. */
struct poet_dot {
  int32_t rows, columns, terms, out_row, out_column, a_row, a_term, b_term, b_column;
  int32_t adds, size, loops;
  int32_t count[POET_LOOPS], out_step[POET_LOOPS], a_step[POET_LOOPS],
      b_step[POET_LOOPS];
};
void poet_dot(float *out, const float *a, const float *b, const struct poet_dot *t);

/* Of images with two axes, in groups of `outs` features each; both gradients, too. Each
   `every` taps of a window lie on an element, `in_next` further on. */
struct poet_convolution {
  int32_t batch, groups, outs, terms;
  int32_t in_size[2], window[2], out_size[2], stride[2], low[2], in_dilation[2],
      window_dilation[2], every[2], in_next[2];
  int32_t in_batch, in_group, in_term, in_step[2];
  int32_t w_out, w_term, w_step[2];
  int32_t out_batch, out_feature, out_step[2];
};
void poet_convolution(float *out, const float *in, const float *w,
                      const struct poet_convolution *t);

/* Windows over arrays of up to POET_LOOPS axes, row-major. */
struct poet_window {
  int32_t rank;
  int32_t in_size[POET_LOOPS], out_size[POET_LOOPS], window[POET_LOOPS],
      stride[POET_LOOPS], low[POET_LOOPS], in_dilation[POET_LOOPS],
      window_dilation[POET_LOOPS];
};
void poet_window_sum(float *out, const float *in, const struct poet_window *t);
void poet_window_max(float *out, const float *in, const struct poet_window *t);
void poet_window_min(float *out, const float *in, const struct poet_window *t);
/* out has the shape in_size, source the shape out_size. */
void poet_scatter_max(float *out, const float *source, const float *in,
                      const struct poet_window *t);
void poet_scatter_min(float *out, const float *source, const float *in,
                      const struct poet_window *t);

/* Slices of an array whose starts are elements of `at`, an array of integers. For each
   of `batch` places, and each of the slice's `window`: strides of the array, of the
   packed slices and of `at`. */
struct poet_slices {
  int32_t itemsize, clips, is_unsigned;
  int32_t batch_loops, batch[POET_LOOPS], packed_batch[POET_LOOPS],
      at_batch[POET_LOOPS], array_batch[POET_LOOPS];
  int32_t window_loops, window[POET_LOOPS], packed_window[POET_LOOPS],
      array_window[POET_LOOPS];
  int32_t starts, at_start, limit[POET_LOOPS], array_start[POET_LOOPS];
};
void poet_gather(void *packed, const void *array, const int32_t *at, const void *fill,
                 const struct poet_slices *t);
void poet_scatter(void *array, const void *packed, const int32_t *at,
                  void (*combine)(void *, const void *), const struct poet_slices *t);
void poet_combine_add_f(void *a, const void *b);
void poet_combine_add_i(void *a, const void *b);
void poet_combine_mul_f(void *a, const void *b);
void poet_combine_max_f(void *a, const void *b);
void poet_combine_min_f(void *a, const void *b);
void poet_combine_set(void *a, const void *b);
void poet_combine_set_bytes(void *a, const void *b);

/* Let the first `count` of 2 * count numbers of elements be in the order of their keys,
   which are `step` apart; of equal keys in the order that they have. For `float`, zeros
   are equal and NaN is last; `total` tells zeros apart, and NaN by sign. */
void poet_order(int32_t *order, int32_t count, const void *keys, int32_t step,
                uint32_t (*rank)(const void *, int32_t));
uint32_t poet_rank_total(const void *keys, int32_t at);
uint32_t poet_rank_float(const void *keys, int32_t at);
uint32_t poet_rank_int32(const void *keys, int32_t at);
uint32_t poet_rank_int16(const void *keys, int32_t at);
uint32_t poet_rank_int8(const void *keys, int32_t at);
uint32_t poet_rank_uint32(const void *keys, int32_t at);
uint32_t poet_rank_uint16(const void *keys, int32_t at);
uint32_t poet_rank_uint8(const void *keys, int32_t at);

void poet_threefry(uint32_t *x, uint32_t *y, uint32_t key0, uint32_t key1);

/* Functions of numbers, the same to the bit wherever float is that of IEEE 754. */
float poet_exp(float x);
float poet_log(float x);
float poet_expm1(float x);
float poet_log1p(float x);
float poet_tanh(float x);
float poet_logistic(float x);
float poet_erf(float x);
float poet_erfc(float x);
float poet_erf_inv(float x);
float poet_power(float x, float y);
float poet_power_i(float x, int32_t n);
float poet_power_n(float x, uint32_t n);
uint32_t poet_power_u(uint32_t x, uint32_t n);
float poet_sin(float x);
float poet_cos(float x);
int32_t poet_integer(float x);
uint32_t poet_unsigned(float x);

static inline uint32_t poet_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float poet_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float poet_infinity(void) { return poet_of_bits(0x7f800000u); }
static inline float poet_nan(void) { return poet_of_bits(0x7fc00000u); }

/* NaN if either is. */
static inline float poet_max(float a, float b) { return a > b || a != a ? a : b; }
static inline float poet_min(float a, float b) { return a < b || a != a ? a : b; }
static inline float poet_sign(float x) {
  return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x;
}
static inline uint8_t poet_is_finite(float x) {
  return (poet_bits(x) & 0x7f800000u) != 0x7f800000u;
}
static inline int32_t poet_max_i(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t poet_min_i(int32_t a, int32_t b) { return a < b ? a : b; }
static inline uint32_t poet_max_i_u(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint32_t poet_min_i_u(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline int32_t poet_sign_i(int32_t x) { return (x > 0) - (x < 0); }
static inline uint32_t poet_sign_i_u(uint32_t x) { return x != 0u; }
static inline uint8_t poet_less_i(int32_t a, int32_t b) { return a < b; }
static inline uint8_t poet_less_u(uint32_t a, uint32_t b) { return a < b; }
static inline int32_t poet_abs_i(int32_t x) {
  return x < 0 ? (int32_t)(0u - (uint32_t)x) : x;
}
/* As XLA divides: by zero to all bits set, and no overflow. */
static inline int32_t poet_divide_i(int32_t a, int32_t b) {
  if (b == 0) return -1;
  return b == -1 ? (int32_t)(0u - (uint32_t)a) : a / b;
}
static inline uint32_t poet_divide_i_u(uint32_t a, uint32_t b) {
  return b == 0 ? ~0u : a / b;
}
static inline int32_t poet_remainder_i(int32_t a, int32_t b) {
  if (b == 0) return a;
  return b == -1 ? 0 : a % b;
}
static inline uint32_t poet_remainder_i_u(uint32_t a, uint32_t b) {
  return b == 0 ? a : a % b;
}
static inline int32_t poet_shift_right(int32_t x, uint32_t n) {
  return x < 0 ? ~(int32_t)(~(uint32_t)x >> n) : (int32_t)((uint32_t)x >> n);
}
static inline int32_t poet_integer_within(float x, int32_t low, int32_t high) {
  return poet_min_i(poet_max_i(poet_integer(x), low), high);
}

#endif
