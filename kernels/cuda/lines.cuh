// Lines of 16 bytes that carry 8 bytes of data, each 4 of them with a flag beside it in one access of 8: any data, and what has come is known without
// a barrier. The flag is an odd number made from the launch's, never 0, so memory that begins with zeros holds no flag.
#pragma once
#include "frame.cuh"

SYMMEM_DEVICE u32 lineFlag(u32 epoch) { return epoch << 1 | 1; }
SYMMEM_DEVICE Halves lineOf(u32 flag, u32 a, u32 b) { return {{(u64)flag << 32 | a, (u64)flag << 32 | b}}; }
SYMMEM_DEVICE bool lineHas(const Halves &x, u32 flag) { return (u32)(x.h[0] >> 32) == flag && (u32)(x.h[1] >> 32) == flag; }

// kFlagTaken is the flag by which a rank that sends nothing back says that it has taken the lines of a launch. Two buffers of lines take turns. A line
// is written again two launches later, and by then it must have been read. Where lines go both ways between two ranks, that is so by itself: a rank
// ends a launch only with the other's lines of it, and those are sent after the other has ended the launch before. Where they go one way only,
// nothing would hold the sender back, which may be any number of launches ahead: so it waits until the launch two before was taken.
enum : u32 { kFlagTaken = 2 };
