// Schedules of the collectives: the integers of schedule.py, as the world executes them.
#pragma once

#include <cstdint>
#include <vector>

namespace tfring {

struct Range {
  int64_t begin = 0;
  int64_t size = 0;
  int64_t end() const { return begin + size; }
};

// One step of a member of a group, at a position in its order: which chunk it sends to which position, which
// chunk it receives from which, and whether it adds to what it has. -1 where it does neither.
struct ScheduleStep {
  int to;
  int send;
  int from;
  int recv;
  bool reduce;
};
using Schedule = std::vector<ScheduleStep>;

// Chunk `index` of `count` things shared among `size` members; the first count % size hold one more.
inline Range chunk_of(int64_t count, int size, int index) {
  const int64_t base = count / size;
  const int64_t extra = count % size;
  return {index * base + (index < extra ? index : extra), base + (index < extra ? 1 : 0)};
}

// Up to this many bytes in all, every member's full contribution goes to every other.
constexpr int64_t kSmallBytes = 64 * 1024;
// Up to this many bytes a member, delays cost more than what a ring gains: the members halve and double.
constexpr int64_t kHalvingBytes = 128 * 1024;
// The same where hosts have several: halving sends what each of them has through one interface.
constexpr int64_t kHalvingSharedBytes = 16 * 1024;
// Up to this many bytes a member, the delays of a chain of many members cost more than what it gains.
constexpr int64_t kTreeBytes = 4 * 1024;
// Up to this many members send a small contribution to each other straight.
constexpr int kFlatMembers = 16;

inline bool is_small(int64_t num_bytes, int size) { return num_bytes * size <= kSmallBytes; }

enum class Algorithm : int32_t {
  kAuto = 0,
  kFlat = 1,
  kBruck = 2,
  kRing = 3,
  kTwoLevel = 4,
  kGather = 5,
  kOwner = 6,
  kHalving = 7,
  kTree = 8
};

// Returns the algorithm of an all_reduce of this number of bytes; `local_size` is the number of members on
// each host, 0 where hosts differ in it.
Algorithm choose_all_reduce(Algorithm wanted, int64_t num_bytes, int size, int local_size);
// Returns the algorithm of a broadcast or a reduce, kFlat, kTree or kRing.
Algorithm choose_rooted(int64_t num_bytes, int size);
// Returns the algorithm of an all_gather among many, kBruck or kRing, from the bytes of all rows.
Algorithm choose_all_gather(int64_t num_bytes);
// Returns the algorithm of a sum of rows under ids, kGather or kOwner, from the bytes that all members
// together sent the last time, each its own ids once, and the bytes of all sums; 0 for unknown.
Algorithm choose_row_sums(Algorithm wanted, int64_t sent, int64_t summed, int size);
// Those by which small contributions are gathered.
Algorithm choose_small(Algorithm wanted, int size);

// Returns the largest power of two up to `size`.
int halving_chunks(int size);

// All clear `steps` first.
void ring_all_reduce(int position, int size, Schedule* steps);
void ring_all_gather(int position, int size, Schedule* steps);
void ring_reduce_scatter(int position, int size, Schedule* steps);
void ring_broadcast(int position, int size, int root, Schedule* steps);
void ring_reduce(int position, int size, int root, Schedule* steps);
void tree_broadcast(int position, int size, int root, Schedule* steps);
void tree_reduce(int position, int size, int root, Schedule* steps);
void flat_all_gather(int position, int size, Schedule* steps);
void flat_broadcast(int position, int size, int root, Schedule* steps);
void bruck_all_gather(int position, int size, Schedule* steps);
// The buffer is cut into `halving_chunks`.
void halving_all_reduce(int position, int size, Schedule* steps);
void two_level_all_reduce(int position, int size, int local_size, Schedule* steps);

// The positions with which this one may exchange anything in a collective of its group.
std::vector<int> partners(int position, int size, int local_size);

}  // namespace tfring
