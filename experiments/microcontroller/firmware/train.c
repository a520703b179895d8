/* Training steps on examples in flash: losses, accuracy, and a checksum of the state. */
#include "board.h"

#include <string.h>

#include "poet_step.h"
#include "train_settings.h"

extern const uint8_t train_inputs[];
extern const uint8_t train_labels[];

static void write_number(int64_t x) {
  char text[24];
  int at = sizeof text;
  const int is_negative = x < 0;
  uint64_t left = is_negative ? (uint64_t)-x : (uint64_t)x;
  text[--at] = 0;
  do {
    text[--at] = (char)('0' + left % 10u);
    left /= 10u;
  } while (left);
  if (is_negative) text[--at] = '-';
  board_write(text + at);
}

static void report(const char *name, int64_t x) {
  board_write(name);
  board_write("=");
  write_number(x);
  board_write(" ");
}

/* -1 for what is not a number, negative or 2,000 and more: conversion of a float to 64
   bits would link that of doubles. */
static int32_t millionths(float x) {
  return x >= 0.0f && x < 2000.0f ? (int32_t)(x * 1e6f) : -1;
}

/* Fill a batch with examples from number `first` on, and set the learning rate. */
static void give(uint32_t first, float learning_rate) {
  for (uint32_t row = 0; row < BATCH; ++row) {
    const uint32_t example = (first + row) % EXAMPLES;
    TRAIN_LABELS[row] = train_labels[example];
    for (uint32_t i = 0; i < WIDTH; ++i)
      TRAIN_INPUTS[row * WIDTH + i] =
          (float)train_inputs[example * WIDTH + i] * SCALE - OFFSET;
  }
  *TRAIN_RATE = learning_rate;
}

/* FNV-1a of the state between steps, in RAM alone. */
static uint32_t checksum(void) {
  uint32_t hash = 2166136261u;
  for (int i = 0; i < TRAIN_STATE; ++i) {
    if (poet_results[i].offset < 0) continue;
    const uint8_t *data = (const uint8_t *)poet_arena + poet_results[i].offset;
    for (uint32_t k = 0; k < poet_results[i].bytes; ++k)
      hash = (hash ^ data[k]) * 16777619u;
  }
  return hash;
}

/* Correct answers of a hundred, for the examples after those that are trained on: a
   step whose learning rate is 0 changes nothing. */
static int accuracy(void) {
  int right = 0, all = 0;
  for (uint32_t at = TRAINED; at + BATCH <= EXAMPLES; at += BATCH) {
    give(at, 0.0f);
    if (poet_step()) return -1;
    right += *TRAIN_CORRECT;
    all += BATCH;
  }
  return all ? 100 * right / all : 0;
}

int train(void) {
  if (poet_init()) return 2;
  if (RESTORES && poet_restore(board_state_read)) return 4;
  uint64_t spent = 0;
  for (uint32_t step = 0; step < STEPS; ++step) {
    const uint32_t turns = TRAINED / BATCH;
    give(step % turns * BATCH, RATE);
    board_guard(1);
    const uint64_t start = board_instructions();
    const int failed = poet_step();
    spent += board_instructions() - start;
    board_guard(0);
    if (failed) return 2;
    if (step < 3 || (step + 1) % EVERY == 0 || step + 1 == STEPS) {
      report("step", step + 1);
      report("loss_1e6", millionths(*TRAIN_LOSS));
      report("correct", *TRAIN_CORRECT);
      board_write("\n");
    }
  }
  report("checksum", checksum());
  report("instructions", (int64_t)(spent / STEPS));
  if (TRAINED + BATCH <= EXAMPLES) report("accuracy", accuracy());
  report("arena", POET_ARENA_BYTES);
  board_write("\n");
  if (RESTORES && poet_save(board_state_write)) return 3;
  for (int i = 0; SAVES && i < TRAIN_STATE; ++i)
    if (poet_results[i].offset >= 0) {
      char name[] = "state_000.bin";
      name[6] = (char)('0' + i / 100);
      name[7] = (char)('0' + i / 10 % 10);
      name[8] = (char)('0' + i % 10);
      const uint8_t *data = (const uint8_t *)poet_arena + poet_results[i].offset;
      if (board_save(name, data, poet_results[i].bytes)) return 3;
    }
  return 0;
}
