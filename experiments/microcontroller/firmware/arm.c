/* A Cortex-M board under QEMU: start, semihosting, storage in a file, and a timer.

   QEMU is started with -icount shift=0, so that an instruction takes a nanosecond of
   its clock, and the timer's 25 MHz count 40 instructions a tick. */
#include <string.h>

#include "board.h"
#include "poet_step.h"

extern uint32_t stack_top[], data_start[], data_end[], data_load[], bss_start[],
    bss_end[], arena_start[], arena_end[];

enum { OPEN = 1, CLOSE = 2, WRITE0 = 4, WRITE = 5, READ = 6, SEEK = 10, EXIT = 0x20 };

static int32_t semihosting(int32_t operation, const void *block) {
  register int32_t r0 __asm__("r0") = operation;
  register const void *r1 __asm__("r1") = block;
  __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

void board_write(const char *text) { semihosting(WRITE0, text); }

void board_exit(int status) {
  const uint32_t block[2] = {0x20026u, (uint32_t)status};
  semihosting(EXIT, block);
  for (;;) continue;
}

/* `mode` as in the ARM semihosting manual: 1 is rb, 3 is r+b, 5 is wb, 7 is w+b. */
static int32_t file(const char *name, uint32_t mode) {
  const uint32_t block[3] = {(uint32_t)name, mode, (uint32_t)strlen(name)};
  return semihosting(OPEN, block);
}

int board_save(const char *name, const void *data, uint32_t bytes) {
  const int32_t handle = file(name, 5);
  const uint32_t block[3] = {(uint32_t)handle, (uint32_t)data, bytes};
  if (handle < 0 || semihosting(WRITE, block)) return -1;
  return semihosting(CLOSE, block);
}

static int move(int32_t operation, int32_t handle, uint32_t at, const void *data,
                uint32_t bytes) {
  const uint32_t to[2] = {(uint32_t)handle, at};
  const uint32_t block[3] = {(uint32_t)handle, (uint32_t)data, bytes};
  return handle < 0 || semihosting(SEEK, to) || semihosting(operation, block);
}

static int move_page(int32_t operation, uint32_t at, const void *data,
                     uint32_t bytes) {
  static int32_t storage = -1;
  if (storage < 0) storage = file("storage.bin", POET_STORED_BYTES ? 3 : 7);
  return move(operation, storage, at, data, bytes);
}

int poet_page_out(uint32_t at, const void *from, uint32_t bytes) {
  return move_page(WRITE, at, from, bytes);
}

int poet_page_in(uint32_t at, void *to, uint32_t bytes) {
  return move_page(READ, at, to, bytes);
}

static int move_state(int32_t operation, uint32_t mode, uint32_t at, const void *data,
                      uint32_t bytes) {
  const int32_t handle = file("state.bin", mode);
  const int failed = move(operation, handle, at, data, bytes);
  const uint32_t block[1] = {(uint32_t)handle};
  return failed || semihosting(CLOSE, block);
}

int board_state_write(uint32_t at, const void *from, uint32_t bytes) {
  return move_state(WRITE, at ? 3 : 5, at, from, bytes);
}

int board_state_read(uint32_t at, void *to, uint32_t bytes) {
  return move_state(READ, 1, at, to, bytes);
}

static volatile uint32_t *const timer = (volatile uint32_t *)BOARD_TIMER;

uint64_t board_instructions(void) { return 40u * (uint64_t)(0xffffffffu - timer[1]); }

void reset(void) {
#ifdef BOARD_FPU
  *(volatile uint32_t *)0xe000ed88u |= 0xfu << 20;
  __asm__ volatile("dsb\nisb");
#endif
  memcpy(data_start, data_load, (size_t)((uint8_t *)data_end - (uint8_t *)data_start));
  memset(bss_start, 0, (size_t)((uint8_t *)bss_end - (uint8_t *)bss_start));
  memset(arena_start, 0, (size_t)((uint8_t *)arena_end - (uint8_t *)arena_start));
  timer[2] = 0xffffffffu;
  timer[1] = 0xffffffffu;
  timer[0] = 1u;
  board_exit(train());
}

/* An access that the Memory Protection Unit forbids is a hard fault, as no other one is
   enabled. */
static void fault(void) {
  const int is_forbidden = *(volatile uint32_t *)0xe000ed28u & 0x82u;
  board_write(is_forbidden ? "memory outside of the arena\n" : "fault\n");
  board_exit(is_forbidden ? 71 : 70);
}

__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    stack_top, (const void *)reset, (const void *)fault, (const void *)fault,
    (const void *)fault, (const void *)fault, (const void *)fault,
};
