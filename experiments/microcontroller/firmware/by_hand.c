/* The step of a perceptron of three layers on 16 digits, written by hand in place of
   the generated one: the same arguments and results, and arrays of its own. */
#include <string.h>

#include "kernels.h"
#include "poet_step.h"
#include "train_settings.h"

enum { HIDDEN = 32, CLASSES = 10 };

uint64_t poet_arena[(POET_ARENA_BYTES + 7) / 8];
static float first[BATCH * HIDDEN], second[BATCH * HIDDEN], delta[BATCH * HIDDEN],
    scores[BATCH * CLASSES];

/* out = x w + b, without what is negative if `is_hidden`. Four columns share what is
   read of x. */
static void forward(float *out, const float *x, const float *w, const float *b,
                    int ins, int outs, int is_hidden) {
  for (int row = 0; row < BATCH; ++row, x += ins, out += outs) {
    int j = 0;
    for (; j + 4 <= outs; j += 4) {
      float s0 = b[j], s1 = b[j + 1], s2 = b[j + 2], s3 = b[j + 3];
      const float *column = w + j;
      for (int i = 0; i < ins; ++i, column += outs) {
        s0 += x[i] * column[0];
        s1 += x[i] * column[1];
        s2 += x[i] * column[2];
        s3 += x[i] * column[3];
      }
      out[j] = s0;
      out[j + 1] = s1;
      out[j + 2] = s2;
      out[j + 3] = s3;
    }
    for (; j < outs; ++j) {
      float s = b[j];
      for (int i = 0; i < ins; ++i) s += x[i] * w[i * outs + j];
      out[j] = s;
    }
    if (is_hidden)
      for (j = 0; j < outs; ++j) out[j] = out[j] > 0.0f ? out[j] : 0.0f;
  }
}

/* out = d w', where what the layer was given is positive. */
static void backward(float *out, const float *d, const float *w, const float *given,
                     int ins, int outs) {
  for (int row = 0; row < BATCH; ++row, d += outs, given += ins, out += ins)
    for (int i = 0; i < ins; i += 4) {
      const float *w0 = w + i * outs, *w1 = w0 + outs, *w2 = w1 + outs, *w3 = w2 + outs;
      float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
      for (int j = 0; j < outs; ++j) {
        s0 += d[j] * w0[j];
        s1 += d[j] * w1[j];
        s2 += d[j] * w2[j];
        s3 += d[j] * w3[j];
      }
      out[i] = given[i] > 0.0f ? s0 : 0.0f;
      out[i + 1] = given[i + 1] > 0.0f ? s1 : 0.0f;
      out[i + 2] = given[i + 2] > 0.0f ? s2 : 0.0f;
      out[i + 3] = given[i + 3] > 0.0f ? s3 : 0.0f;
    }
}

/* w -= rate x' d, and b -= rate times the sums of d over rows. */
static void descend(float *w, float *b, const float *x, const float *d, int ins,
                    int outs, float rate) {
  for (int i = 0; i < ins; ++i, w += outs) {
    int j = 0;
    for (; j + 4 <= outs; j += 4) {
      float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
      const float *from = x + i, *column = d + j;
      for (int row = 0; row < BATCH; ++row, from += ins, column += outs) {
        s0 += *from * column[0];
        s1 += *from * column[1];
        s2 += *from * column[2];
        s3 += *from * column[3];
      }
      w[j] -= rate * s0;
      w[j + 1] -= rate * s1;
      w[j + 2] -= rate * s2;
      w[j + 3] -= rate * s3;
    }
    for (; j < outs; ++j) {
      float s = 0.0f;
      for (int row = 0; row < BATCH; ++row) s += x[row * ins + i] * d[row * outs + j];
      w[j] -= rate * s;
    }
  }
  for (int j = 0; j < outs; ++j) {
    float s = 0.0f;
    for (int row = 0; row < BATCH; ++row) s += d[row * outs + j];
    b[j] -= rate * s;
  }
}

/* Scores become the gradient of the mean loss; the sum of losses, and right answers. */
static float losses(int32_t *correct) {
  float sum = 0.0f;
  for (int row = 0; row < BATCH; ++row) {
    float *x = scores + row * CLASSES, total = 0.0f;
    const int32_t label = TRAIN_LABELS[row];
    int best = 0;
    for (int j = 1; j < CLASSES; ++j)
      if (x[j] > x[best]) best = j;
    const float most = x[best], own = x[label];
    for (int j = 0; j < CLASSES; ++j) total += x[j] = poet_exp(x[j] - most);
    for (int j = 0; j < CLASSES; ++j) x[j] *= 1.0f / (BATCH * total);
    x[label] -= 1.0f / BATCH;
    sum += poet_log(total) + most - own;
    *correct += best == label;
  }
  return sum;
}

int poet_step(void) {
  float *const b0 = poet_argument_0, *const w0 = poet_argument_1;
  float *const b1 = poet_argument_2, *const w1 = poet_argument_3;
  float *const b2 = poet_argument_4, *const w2 = poet_argument_5;
  const float *const x = TRAIN_INPUTS, rate = *TRAIN_RATE;
  int32_t correct = 0;
  forward(first, x, w0, b0, WIDTH, HIDDEN, 1);
  forward(second, first, w1, b1, HIDDEN, HIDDEN, 1);
  forward(scores, second, w2, b2, HIDDEN, CLASSES, 0);
  const float sum = losses(&correct);
  backward(delta, scores, w2, second, HIDDEN, CLASSES);
  descend(w2, b2, second, scores, HIDDEN, CLASSES, rate);
  backward(second, delta, w1, first, HIDDEN, HIDDEN);
  descend(w1, b1, first, delta, HIDDEN, HIDDEN, rate);
  descend(w0, b0, x, second, WIDTH, HIDDEN, rate);
  *TRAIN_LOSS = sum / BATCH;
  *TRAIN_CORRECT = correct;
  return 0;
}

int poet_init(void) {
  extern const float poet_state_0[], poet_state_1[], poet_state_2[], poet_state_3[],
      poet_state_4[], poet_state_5[];
  memcpy(poet_argument_0, poet_state_0, HIDDEN * sizeof(float));
  memcpy(poet_argument_1, poet_state_1, WIDTH * HIDDEN * sizeof(float));
  memcpy(poet_argument_2, poet_state_2, HIDDEN * sizeof(float));
  memcpy(poet_argument_3, poet_state_3, HIDDEN * HIDDEN * sizeof(float));
  memcpy(poet_argument_4, poet_state_4, CLASSES * sizeof(float));
  memcpy(poet_argument_5, poet_state_5, HIDDEN * CLASSES * sizeof(float));
  return 0;
}
