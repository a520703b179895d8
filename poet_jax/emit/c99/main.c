/* One step on this machine, beside JAX's results. Pages lie in memory here. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "poet_step.h"

extern const void *const poet_given[];
extern const void *const poet_expected[];

static uint8_t *pages[POET_PAGES + 1];
static uint32_t page_bytes[POET_PAGES + 1];

int poet_page_out(int32_t page, const void *from, uint32_t bytes) {
  if (!pages[page]) pages[page] = malloc(bytes);
  if (!pages[page]) return -1;
  memcpy(pages[page], from, bytes);
  page_bytes[page] = bytes;
  return 0;
}

int poet_page_in(int32_t page, void *to, uint32_t bytes) {
  if (!pages[page] || page_bytes[page] != bytes) return -1;
  memcpy(to, pages[page], bytes);
  return 0;
}

static double element(const void *data, const struct poet_array *x, uint32_t i) {
  const uint8_t *at = (const uint8_t *)data + (size_t)i * x->itemsize;
  if (x->kind == 'f') {
    float value;
    memcpy(&value, at, sizeof value);
    return (double)value;
  }
  uint32_t value = 0;
  memcpy(&value, at, x->itemsize);
  return (double)value;
}

/* Add to the squares of what differs, and of what is expected, of one array. */
static void compare(const void *found, const void *expected,
                    const struct poet_array *x, double *error, double *norm) {
  for (uint32_t i = 0; i < x->bytes / x->itemsize; ++i) {
    const double a = element(found, x, i), b = element(expected, x, i);
    *error += (a - b) * (a - b);
    *norm += b * b;
  }
}

int main(void) {
  if (poet_init()) return 2;
  for (int i = 0; i < POET_ARGUMENTS; ++i)
    if (poet_given[i])
      memcpy((uint8_t *)poet_arena + poet_arguments[i].offset, poet_given[i],
             poet_arguments[i].bytes);
  if (poet_step()) return 2;
  double error = 0.0, norm = 0.0;
  for (int i = 0; i < POET_RESULTS; ++i) {
    const struct poet_array *x = &poet_results[i];
    compare(x->offset < 0 ? (const void *)pages[x->page]
                          : (uint8_t *)poet_arena + x->offset,
            poet_expected[i], x, &error, &norm);
  }
  for (int i = 0; i < POET_PAGES; ++i) free(pages[i]);
  const double relative = sqrt(error) / (sqrt(norm) + 1e-30);
  printf("arena %d bytes, plan %d bytes, relative difference %.2e\n",
         POET_ARENA_BYTES, POET_PLAN_BYTES, relative);
  return relative < 1e-3 ? 0 : 1;
}
