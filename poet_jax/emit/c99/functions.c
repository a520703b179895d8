/* Functions of numbers, in float arithmetic alone, so that every processor computes the
   same bits. Polynomials are least-squares fits, reweighted towards the least largest
   error; each is as exact as float is. */
#include "kernels.h"

/* c[0] + c[1] x + ... + c[degree] x^degree */
static float polynomial(float x, const float *c, int32_t degree) {
  float sum = c[degree];
  while (degree > 0) sum = sum * x + c[--degree];
  return sum;
}

/* exp(x) - 1 - x, for |x| of at most half of log 2 */
static float exp_rest(float x) {
  static const float c[] = {0.5f, 0.16666518f, 0.041666206f, 0.008368956f,
                            0.001395058f};
  return x * x * polynomial(x, c, 4);
}

static float power_of_two(int32_t n) { return poet_of_bits((uint32_t)(n + 127) << 23); }

/* x = n log 2 + the result; log 2 in two parts, the first one exact times n */
static float exp_reduced(float x, int32_t *n) {
  const float scaled = x * 1.44269504f;
  *n = (int32_t)(scaled < 0.0f ? scaled - 0.5f : scaled + 0.5f);
  return (x - (float)*n * 0.693359375f) + (float)*n * 2.12194440e-4f;
}

float poet_exp(float x) {
  int32_t n;
  if (x != x) return x;
  if (x > 89.0f) return poet_infinity();
  if (x < -104.0f) return 0.0f;
  const float r = exp_reduced(x, &n);
  const int32_t half = n / 2;
  return (1.0f + (r + exp_rest(r))) * power_of_two(half) * power_of_two(n - half);
}

float poet_expm1(float x) {
  if (x == 0.0f) return x;
  if (x < 0.34f && x > -0.34f) return x + exp_rest(x);
  if (x > 20.0f || x < -20.0f || x != x) return poet_exp(x) - 1.0f;
  int32_t n;
  const float r = exp_reduced(x, &n), scale = power_of_two(n);
  return scale * (r + exp_rest(r)) + (scale - 1.0f);
}

/* log(1 + f), for 1 + f between the root of 1/2 and that of 2 */
static float log_near_one(float f) {
  static const float c[] = {0.6666667f, 0.40000126f, 0.28550315f, 0.23343794f};
  const float s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
  return f - (half - s * (half + z * polynomial(z, c, 3)));
}

float poet_log(float x) {
  int32_t n = 0;
  if (x != x || x < 0.0f) return poet_nan();
  if (x == 0.0f) return -poet_infinity();
  if (x == poet_infinity()) return x;
  if (x < 1.17549435e-38f) {
    x *= 16777216.0f;
    n = -24;
  }
  uint32_t bits = poet_bits(x);
  n += (int32_t)(bits >> 23) - 127;
  bits = (bits & 0x007fffffu) | 0x3f800000u;
  if (bits > 0x3fb504f3u) {
    bits -= 0x00800000u;
    n += 1;
  }
  const float rest = log_near_one(poet_of_bits(bits) - 1.0f);
  return (float)n * 0.693359375f + (rest - (float)n * 2.12194440e-4f);
}

float poet_log1p(float x) {
  if (x > -0.29f && x < 0.41f) return log_near_one(x);
  const float y = 1.0f + x;
  if (x == poet_infinity() || !(y > 0.0f)) return poet_log(y);
  /* What the sum has lost, to first order. */
  const float lost = x > 1.0f ? 1.0f - (y - x) : x - (y - 1.0f);
  return poet_log(y) + lost / y;
}

float poet_tanh(float x) {
  if (x != x) return x;
  const float size = fabsf(x);
  if (size > 9.1f) return x > 0.0f ? 1.0f : -1.0f;
  const float e = poet_expm1(2.0f * size), t = e / (e + 2.0f);
  return poet_bits(x) >> 31 ? -t : t;
}

float poet_logistic(float x) {
  if (x >= 0.0f) return 1.0f / (1.0f + poet_exp(-x));
  const float e = poet_exp(x);
  return e / (1.0f + e);
}

/* erfc, of 1 and more */
static float erfc_tail(float x) {
  static const float far[] = {-0.00015004858f, 0.28485230f, 0.26006219f, 0.34651390f,
                              -0.10096012f,    0.56000859f, -0.46898273f, 0.11870566f};
  const float t = 1.0f / (1.0f + 0.5f * x);
  if (x > 11.0f) return 0.0f;
  return poet_exp(-x * x) * polynomial(t, far, 7);
}

float poet_erfc(float x) {
  if (fabsf(x) < 1.0f || x != x) return 1.0f - poet_erf(x);
  return x < 0.0f ? 2.0f - erfc_tail(-x) : erfc_tail(x);
}

float poet_erf(float x) {
  static const float near[] = {1.1283791f,   -0.37612626f,   0.112836f,
                               -0.026854444f, 0.0051895343f, -0.0008020831f,
                               7.8890851e-05f};
  const float size = fabsf(x);
  if (x != x) return x;
  if (size < 1.0f) return x * polynomial(x * x, near, 6);
  if (size > 4.0f) return x > 0.0f ? 1.0f : -1.0f;
  const float value = 1.0f - erfc_tail(size);
  return x < 0.0f ? -value : value;
}

float poet_erf_inv(float x) {
  static const float near[] = {1.5014094f,      0.24664029f,    -0.0041773841f,
                               -0.0012527638f,  0.00021834223f, -4.9504929e-06f,
                               -3.4621216e-06f, 4.6338752e-07f, 2.3184832e-08f,
                               -8.5908960e-09f};
  static const float far[] = {2.8329768f,     1.0016749f,      0.0094445292f,
                              -0.0076365075f, 0.0056930720f,   -0.0036022044f,
                              0.0014694709f,  -4.4789354e-05f, -0.00029701533f,
                              0.00010551672f};
  if (!(x > -1.0f && x < 1.0f)) {
    return x == 1.0f    ? poet_infinity()
           : x == -1.0f ? -poet_infinity()
                        : poet_nan();
  }
  const float w = -poet_log((1.0f - x) * (1.0f + x));
  if (w < 5.0f) return x * polynomial(w - 2.5f, near, 9);
  return x * polynomial(sqrtf(w) - 3.0f, far, 9);
}

float poet_power_n(float x, uint32_t n) {
  float result = 1.0f;
  for (; n; n >>= 1) {
    if (n & 1u) result *= x;
    x *= x;
  }
  return result;
}

float poet_power_i(float x, int32_t n) {
  return n < 0 ? 1.0f / poet_power_n(x, 0u - (uint32_t)n) : poet_power_n(x, (uint32_t)n);
}

uint32_t poet_power_u(uint32_t x, uint32_t n) {
  uint32_t result = 1u;
  for (; n; n >>= 1) {
    if (n & 1u) result *= x;
    x *= x;
  }
  return result;
}

float poet_power(float x, float y) {
  const int is_whole = floorf(y) == y;
  if (y == 0.0f || x == 1.0f) return 1.0f;
  if (x == -1.0f && fabsf(y) == poet_infinity()) return 1.0f;
  if (is_whole && fabsf(y) <= 64.0f) return poet_power_i(x, (int32_t)y);
  if (x < 0.0f && !is_whole && x != -poet_infinity()) return poet_nan();
  const float size = poet_exp(y * poet_log(fabsf(x)));
  const int is_odd = is_whole && fabsf(y) < 16777216.0f && ((int32_t)y & 1);
  return is_odd && poet_bits(x) >> 31 ? -size : size;
}

/* x = n pi / 2 + the result, below 2^16: pi / 2 in three parts, whose products with n
   are exact but for the last */
static float quarter(float x, int32_t *n) {
  const float scaled = x * 0.636619772f;
  *n = (int32_t)(scaled < 0.0f ? scaled - 0.5f : scaled + 0.5f);
  const float k = (float)*n;
  return ((x - k * 1.5703125f) - k * 4.83751297e-4f) - k * 7.54978942e-8f;
}

/* The same from 2^16 on: x 2 / pi modulo 4, in units of 2^-62, by the 96 bits of 2 / pi
   that matter. Those before them make whole turns. */
static float quarter_of_large(float x, int32_t *n) {
  static const uint32_t digits[] = {0u,          0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                    0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
  const uint32_t first = (poet_bits(x) >> 23 & 255u) - 120u;
  const uint64_t whole = (poet_bits(x) & 0x7fffffu) | 0x800000u;
  uint64_t words[3];
  for (uint32_t k = 0; k < 3; ++k) {
    const uint64_t high = digits[first / 32 + k], low = digits[first / 32 + k + 1];
    words[k] = (high << 32 | low) >> (32 - first % 32) & 0xffffffffu;
  }
  uint64_t turn =
      (whole * words[0] << 32) + whole * words[1] + (whole * words[2] >> 32);
  if (x < 0.0f) turn = 0u - turn;
  const uint64_t nearest = (turn + (1ull << 61)) >> 62;
  *n = (int32_t)nearest;
  return (float)(int64_t)(turn - (nearest << 62)) * 3.40612158e-19f;
}

static float circular(float x, int32_t shift) {
  static const float sine[] = {-0.16666667f, 0.0083333319f, -0.00019840122f,
                               2.7251412e-06f};
  static const float cosine[] = {0.041666668f, -0.0013888398f, 2.4558216e-05f};
  int32_t n;
  if (!poet_is_finite(x)) return poet_nan();
  const float r = fabsf(x) < 65536.0f ? quarter(x, &n) : quarter_of_large(x, &n);
  const float z = r * r;
  n += shift;
  const float value = n & 1 ? 1.0f - 0.5f * z + z * z * polynomial(z, cosine, 2)
                            : r + r * z * polynomial(z, sine, 3);
  return n & 2 ? -value : value;
}

float poet_sin(float x) { return x == 0.0f ? x : circular(x, 0); }
float poet_cos(float x) { return circular(x, 1); }

int32_t poet_integer(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return INT32_MAX;
  return x <= -2147483648.0f ? INT32_MIN : (int32_t)x;
}

uint32_t poet_unsigned(float x) {
  if (!(x > 0.0f)) return 0u;
  return x >= 4294967296.0f ? UINT32_MAX : (uint32_t)x;
}
