// Who sends what when: the integers of schedule.py, as the ring executes them.
#pragma once

#include <cstdint>

namespace tfring {

struct Range {
  int64_t begin = 0;
  int64_t size = 0;
  int64_t end() const { return begin + size; }
};

// One step of a rank: which chunk it sends on, which it receives, and whether it adds to what it has.
struct ScheduleStep {
  int send;  // -1: nothing
  int recv;  // -1: nothing
  bool reduce;
};

// Chunk `index` of `count` things shared among `world_size` ranks; the first count % world_size hold one
// more.
inline Range chunk_of(int64_t count, int world_size, int index) {
  const int64_t base = count / world_size;
  const int64_t extra = count % world_size;
  return {index * base + (index < extra ? index : extra), base + (index < extra ? 1 : 0)};
}

// Below this many bytes every rank's whole contribution goes round, in N - 1 steps instead of 2 (N - 1).
constexpr int64_t kSmallBytes = 64 * 1024;

inline bool is_small(int64_t num_bytes, int world_size) { return num_bytes * world_size <= kSmallBytes; }

inline int wrap(int value, int world_size) { return ((value % world_size) + world_size) % world_size; }

inline int num_all_reduce_steps(int world_size) { return 2 * (world_size - 1); }
inline ScheduleStep all_reduce_step(int rank, int world_size, int step) {
  return {wrap(rank - step, world_size), wrap(rank - step - 1, world_size), step < world_size - 1};
}

inline int num_all_gather_steps(int world_size) { return world_size - 1; }
inline ScheduleStep all_gather_step(int rank, int world_size, int step) {
  return {wrap(rank - step, world_size), wrap(rank - step - 1, world_size), false};
}

inline int num_reduce_scatter_steps(int world_size) { return world_size - 1; }
inline ScheduleStep reduce_scatter_step(int rank, int world_size, int step) {
  return {wrap(rank - step - 1, world_size), wrap(rank - step - 2, world_size), true};
}

// Chunk 0 is the whole buffer, chunk 1 the word of the last rank to the root that it arrived.
inline int num_broadcast_steps() { return 2; }
inline ScheduleStep broadcast_step(int rank, int world_size, int root, int step) {
  const bool is_root = rank == root;
  const bool is_last = wrap(rank + 1, world_size) == root;
  if (step == 0) return is_root ? ScheduleStep{0, -1, false} : ScheduleStep{-1, 0, false};
  if (is_root) return {-1, 1, false};
  return {is_last ? 1 : 0, -1, false};
}

}  // namespace tfring
