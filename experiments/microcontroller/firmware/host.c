/* This machine in place of a board. */
#include <stdio.h>
#include <stdlib.h>

#include "board.h"
#include "poet_step.h"

/* The storage is a file, at some place. */
static FILE *storage(uint32_t at) {
  static FILE *file;
  if (!file) file = fopen("storage.bin", POET_STORED_BYTES ? "r+b" : "w+b");
  return file && !fseek(file, (long)at, SEEK_SET) ? file : NULL;
}

int poet_page_out(uint32_t at, const void *from, uint32_t bytes) {
  FILE *const file = storage(at);
  return !file || fwrite(from, 1, bytes, file) != bytes;
}

int poet_page_in(uint32_t at, void *to, uint32_t bytes) {
  FILE *const file = storage(at);
  return !file || fread(to, 1, bytes, file) != bytes;
}

void board_write(const char *text) {
  fputs(text, stdout);
  fflush(stdout);
}

int board_save(const char *name, const void *data, uint32_t bytes) {
  FILE *file = fopen(name, "wb");
  if (!file) return -1;
  const size_t written = fwrite(data, 1, bytes, file);
  return fclose(file) || written != bytes;
}

static FILE *state(const char *mode, uint32_t at) {
  FILE *file = fopen("state.bin", mode);
  if (file && fseek(file, (long)at, SEEK_SET)) return NULL;
  return file;
}

int board_state_write(uint32_t at, const void *from, uint32_t bytes) {
  FILE *file = state(at ? "r+b" : "wb", at);
  if (!file) return -1;
  const size_t written = fwrite(from, 1, bytes, file);
  return fclose(file) || written != bytes;
}

int board_state_read(uint32_t at, void *to, uint32_t bytes) {
  FILE *file = state("rb", at);
  if (!file) return -1;
  const size_t found = fread(to, 1, bytes, file);
  return fclose(file) || found != bytes;
}

uint64_t board_instructions(void) { return 0; }

void board_guard(int is_on) { (void)is_on; }

void board_exit(int status) { exit(status); }

int main(void) { return train(); }
