/* The state in RAM, saved and restored with a checksum. */
#include "poet_step.h"

enum { WORDS = 5, PART_BYTES = 64, VERSION = 1 };
static const uint32_t magic = 0x54454f50u;

/* CRC-32 of IEEE 802.3, four bits at a time. */
static uint32_t checksum(uint32_t crc, const void *data, uint32_t bytes) {
  static const uint32_t table[16] = {
      0x00000000u, 0x1db71064u, 0x3b6e20c8u, 0x26d930acu, 0x76dc4190u, 0x6b6b51f4u,
      0x4db26158u, 0x5005713cu, 0xedb88320u, 0xf00f9344u, 0xd6d6a3e8u, 0xcb61b38cu,
      0x9b64c2b0u, 0x86d3d2d4u, 0xa00ae278u, 0xbdbdf21cu};
  crc = ~crc;
  for (uint32_t i = 0; i < bytes; ++i) {
    crc ^= ((const uint8_t *)data)[i];
    crc = (crc >> 4) ^ table[crc & 15u];
    crc = (crc >> 4) ^ table[crc & 15u];
  }
  return ~crc;
}

static uint8_t *place(int number) {
  return (uint8_t *)poet_arena + poet_arguments[poet_saved[number]].offset;
}

static uint32_t size(int number) { return poet_arguments[poet_saved[number]].bytes; }

/* What a saved state of this program begins with, but for its checksum. */
static uint32_t head(uint32_t words[WORDS]) {
  words[0] = magic;
  words[1] = VERSION;
  words[2] = POET_FINGERPRINT;
  words[3] = POET_SAVE_BYTES;
  words[4] = 0;
  return checksum(0, words, 4 * (WORDS - 1));
}

int poet_save(int (*write)(uint32_t at, const void *from, uint32_t bytes)) {
  uint32_t words[WORDS], at = sizeof words;
  words[4] = head(words);
  for (int i = 0; i < POET_SAVED; ++i)
    words[4] = checksum(words[4], place(i), size(i));
  if (write(0, words, sizeof words)) return POET_STATE_FAILED;
  for (int i = 0; i < POET_SAVED; ++i) {
    if (write(at, place(i), size(i))) return POET_STATE_FAILED;
    at += size(i);
  }
  return POET_STATE_OK;
}

int poet_restore(int (*read)(uint32_t at, void *to, uint32_t bytes)) {
  uint32_t own[WORDS], words[WORDS], bytes = 0, at = sizeof words;
  uint8_t part[PART_BYTES];
  const uint32_t first = head(own), end = POET_SAVE_BYTES;
  uint32_t sum = first;
  if (read(0, words, sizeof words)) return POET_STATE_FAILED;
  for (int i = 0; i < WORDS - 1; ++i)
    if (words[i] != own[i]) return POET_STATE_OTHER;
  for (; at < end; at += bytes) {
    bytes = end - at < PART_BYTES ? end - at : PART_BYTES;
    if (read(at, part, bytes)) return POET_STATE_FAILED;
    sum = checksum(sum, part, bytes);
  }
  if (sum != words[4]) return POET_STATE_DAMAGED;
  sum = first;
  at = sizeof words;
  for (int i = 0; i < POET_SAVED; ++i) {
    if (read(at, place(i), size(i))) return POET_STATE_LOST;
    sum = checksum(sum, place(i), size(i));
    at += size(i);
  }
  return sum == words[4] ? POET_STATE_OK : POET_STATE_LOST;
}
