/* The Memory Protection Unit of a Cortex-M: while it is on, only the arena and the
   firmware's own data and stack can be written. */
#include "board.h"
#include "poet_step.h"

extern uint8_t own_start[], own_end[];

static volatile uint32_t *const mpu = (volatile uint32_t *)0xe000ed90u;
enum { CONTROL = 1, NUMBER = 2, BASE = 3, SIZE = 4, LIMIT = 4, ATTRIBUTES = 12 };

#if BOARD_ARMV8

/* Bytes from `start` to `end`, whose `access` is 0 to write and 2 to read. Nothing else
   can be read either. */
static void region(uint32_t number, uint32_t start, uint32_t end, uint32_t access) {
  mpu[NUMBER] = number;
  mpu[BASE] = start | access << 1;
  mpu[LIMIT] = ((end - 1u) & ~31u) | 1u;
}

static void regions(void) {
  const uint32_t arena = (uint32_t)poet_arena;
  mpu[ATTRIBUTES] = 0x44u; /* normal memory, not cached */
  region(0, BOARD_FLASH, BOARD_FLASH + BOARD_FLASH_BYTES, 2);
  region(1, arena, arena + POET_ARENA_BYTES, 0);
  region(2, (uint32_t)own_start, (uint32_t)own_end, 0);
  region(3, BOARD_TIMER, BOARD_TIMER + 32u, 2);
}

#else

enum { WRITES = 1, READS = 5, NORMAL = 1 << 19, MOST_REGIONS = 8 };

/* 2 ^ `log2` bytes, but for those eighths of them whose bit is set in `without`. */
static void region(uint32_t number, uint32_t start, uint32_t log2, uint32_t without,
                   uint32_t access) {
  mpu[NUMBER] = number;
  mpu[BASE] = start;
  mpu[SIZE] = access << 24 | NORMAL | without << 8 | (log2 - 1u) << 1 | 1u;
}

static uint32_t floor_log2(uint32_t x) {
  uint32_t log2 = 0;
  while (x >>= 1) ++log2;
  return log2;
}

/* The whole memory can be read. A region with a higher number counts. The arena is
   several, each of the eighths of a power of two, down to 32 bytes. */
static void regions(void) {
  region(0, 0, 32, 0, READS);
  region(1, (uint32_t)own_start, BOARD_OWN_LOG2, 0, WRITES);
  uint32_t at = (uint32_t)poet_arena, left = (POET_ARENA_BYTES + 31u) & ~31u;
  for (uint32_t number = 2; number < MOST_REGIONS; ++number) {
    const uint32_t log2 = left < 256u ? 8u : floor_log2(left) + 1u;
    const uint32_t eighth = 1u << (log2 - 3u), start = at & ~((1u << log2) - 1u);
    const uint32_t first = (at - start) / eighth;
    uint32_t count = left / eighth;
    if (number == MOST_REGIONS - 1) count = (left + eighth - 1u) / eighth;
    region(number, start, log2, 0xffu & ~(((1u << count) - 1u) << first), WRITES);
    at += count * eighth;
    left = count * eighth < left ? left - count * eighth : 0u;
  }
}

#endif

void board_guard(int is_on) {
  if (is_on) regions();
  mpu[CONTROL] = is_on ? 1u : 0u;
  __asm__ volatile("dsb\nisb" ::: "memory");
}
