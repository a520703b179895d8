/* What train.c needs of a board, or of this machine in its place. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

void board_write(const char *text);
/* Leave a file of so many bytes behind; 0 if that worked. */
int board_save(const char *name, const void *data, uint32_t bytes);
/* Parts of the file state.bin, in order or at any place; 0 if that worked. */
int board_state_write(uint32_t at, const void *from, uint32_t bytes);
int board_state_read(uint32_t at, void *to, uint32_t bytes);
/* Instructions since the start, or 0 where nobody counts. */
uint64_t board_instructions(void);
/* While it is on, writing outside of the arena, the stack and the firmware's own data
   ends the program; this machine guards nothing. */
void board_guard(int is_on);
void board_exit(int status);

int train(void);

#endif
