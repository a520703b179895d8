/* This machine in place of a board. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "poet_step.h"

static uint8_t pages[POET_PAGES + 1][POET_LARGEST_PAGE_BYTES + 1];

int poet_page_out(int32_t page, const void *from, uint32_t bytes) {
  memcpy(pages[page], from, bytes);
  return 0;
}

int poet_page_in(int32_t page, void *to, uint32_t bytes) {
  memcpy(to, pages[page], bytes);
  return 0;
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

void board_exit(int status) { exit(status); }

int main(void) { return train(); }
