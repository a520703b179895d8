/* One step, whose results are written, and then so many steps a repetition, timed:
   `loop RESULTS STEPS REPETITIONS`. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "poet_step.h"

extern const void *const poet_given[];

/* Plans here move no pages. */
int poet_page_out(uint32_t at, const void *from, uint32_t bytes) {
  (void)at, (void)from, (void)bytes;
  return -1;
}

int poet_page_in(uint32_t at, void *to, uint32_t bytes) {
  (void)at, (void)to, (void)bytes;
  return -1;
}

/* The arguments that a step may write over, which are no state. */
static void give(void) {
  for (int i = 0; i < POET_ARGUMENTS; ++i)
    if (poet_given[i])
      memcpy((uint8_t *)poet_arena + poet_arguments[i].offset, poet_given[i],
             poet_arguments[i].bytes);
}

static int step(void) {
  give();
  return poet_step();
}

static int write_results(const char *name) {
  FILE *file = fopen(name, "wb");
  if (!file) return -1;
  size_t missing = 0;
  for (int i = 0; i < POET_RESULTS; ++i) {
    const struct poet_array *x = &poet_results[i];
    missing += x->bytes - fwrite((uint8_t *)poet_arena + x->offset, 1, x->bytes, file);
  }
  return fclose(file) || missing;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **words) {
  if (count != 4 || poet_init() || step() || write_results(words[1])) return 2;
  const int steps = atoi(words[2]), repetitions = atoi(words[3]);
  for (int i = 0; i < repetitions; ++i) {
    const double start = seconds();
    for (int k = 0; k < steps; ++k)
      if (step()) return 2;
    printf("%.9g\n", (seconds() - start) / steps);
  }
  return 0;
}
