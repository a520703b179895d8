/* One step on this machine, beside JAX's results. The storage is memory here; the
   argument is the folder of its files. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "poet_step.h"

extern const void *const poet_given[];
extern const void *const poet_expected[];

static uint8_t *storage, *expected_storage;

int poet_page_out(uint32_t at, const void *from, uint32_t bytes) {
  memcpy(storage + at, from, bytes);
  return 0;
}

int poet_page_in(uint32_t at, void *to, uint32_t bytes) {
  memcpy(to, storage + at, bytes);
  return 0;
}

/* Memory that begins with the state in a file, if there is any; NULL if that fails. */
static uint8_t *loaded(const char *folder, const char *name) {
  char path[4096];
  uint8_t *const data = calloc(POET_PAGE_BYTES + 1u, 1);
  if (!data || !POET_STORED_BYTES) return data;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *const file = fopen(path, "rb");
  if (!file) return NULL;
  const size_t found = fread(data, 1, POET_STORED_BYTES, file);
  return fclose(file) || found != POET_STORED_BYTES ? NULL : data;
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
    if (a == b && isinf(a)) continue; /* their difference is no number */
    if (isnan(a) && isnan(b)) continue;
    if (!isfinite(a) || !isfinite(b)) {
      *error = INFINITY;
      continue;
    }
    *error += (a - b) * (a - b);
    *norm += b * b;
  }
}

int main(int count, char **words) {
  const char *const folder = count > 1 ? words[1] : ".";
  storage = loaded(folder, "poet_storage.bin");
  expected_storage = loaded(folder, "poet_storage_after.bin");
  if (!storage || !expected_storage || poet_init()) return 2;
  for (int i = 0; i < POET_ARGUMENTS; ++i)
    if (poet_given[i])
      memcpy((uint8_t *)poet_arena + poet_arguments[i].offset, poet_given[i],
             poet_arguments[i].bytes);
  if (poet_step()) return 2;
  double errors[POET_RESULTS + 1], norms[POET_RESULTS + 1], total = 0.0, most = 0.0;
  for (int i = 0; i < POET_RESULTS; ++i) {
    double *const error = errors + i, *const norm = norms + i;
    *error = *norm = 0.0;
    const struct poet_array *x = &poet_results[i];
    if (x->offset < 0)
      compare(storage + x->storage, expected_storage + x->storage, x, error, norm);
    else
      compare((uint8_t *)poet_arena + x->offset, poet_expected[i], x, error, norm);
    total += *norm;
  }
  free(storage);
  free(expected_storage);
  /* Each result counts alone, so that a large one hides no other. What differs by less
     than 1e-8 of all results together is rounding. */
  for (int i = 0; i < POET_RESULTS; ++i) {
    const double size = fmax(sqrt(norms[i]), 1e-5 * sqrt(total));
    most = fmax(most, sqrt(errors[i]) / (size + 1e-30));
  }
  printf("arena %d bytes, plan %d bytes, relative difference %.2e\n",
         POET_ARENA_BYTES, POET_PLAN_BYTES, most);
  return most < 1e-3 ? 0 : 1;
}
