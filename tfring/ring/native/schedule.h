// Schedules of the collectives, as documented in schedule.py and executed by the world.
#pragma once

#include <cstdint>
#include <vector>

namespace tfring {

struct Range {
  int64_t begin = 0;
  int64_t size = 0;
  int64_t end() const { return begin + size; }
};

// One step of a member of a group: the chunk that it sends and the position it sends to, the chunk that it
// receives and the position it receives from, and whether it adds the received chunk. -1 for none.
struct ScheduleStep {
  int to;
  int send;
  int from;
  int recv;
  bool reduce;
};
using Schedule = std::vector<ScheduleStep>;

// Returns chunk `index` of `count` items divided among `size` members. The first count % size have one more.
inline Range chunk_of(int64_t count, int size, int index) {
  const int64_t base = count / size;
  const int64_t extra = count % size;
  return {index * base + (index < extra ? index : extra), base + (index < extra ? 1 : 0)};
}

// Up to this many bytes in total, every member sends its full contribution to every other.
constexpr int64_t kSmallBytes = 64 * 1024;
// Up to this many bytes a member, delays cost more than a ring gains, and halving and doubling is used.
constexpr int64_t kHalvingBytes = 128 * 1024;
// The same limit if hosts have several members: halving sends the data of all of them through one interface.
constexpr int64_t kHalvingSharedBytes = 16 * 1024;
// Up to this many bytes a member, the delays of a chain of many members cost more than it gains.
constexpr int64_t kTreeBytes = 4 * 1024;
// Up to this many members send small contributions directly to each other.
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

// Returns the algorithm of an all_reduce of this number of bytes. `local_size` is the number of members on
// each host, 0 if hosts differ.
Algorithm choose_all_reduce(Algorithm wanted, int64_t num_bytes, int size, int local_size);
// Returns the algorithm of a broadcast or a reduce, kFlat, kTree or kRing.
Algorithm choose_rooted(int64_t num_bytes, int size);
// Returns the algorithm of an all_gather among many members, kBruck or kRing, from the bytes of all rows.
Algorithm choose_all_gather(int64_t num_bytes);
// Returns the algorithm of a sum of rows, kGather or kOwner, from the bytes that all members together sent
// the last time, with each member's ids once, and the bytes of all sums; 0 for unknown.
Algorithm choose_row_sums(Algorithm wanted, int64_t sent, int64_t summed, int size);
// Returns the algorithm that gathers small contributions.
Algorithm choose_small(Algorithm wanted, int size);

// Returns the largest power of two up to `size`.
int halving_chunks(int size);

// All of these clear `steps` first.
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
// The buffer is divided into `halving_chunks`.
void halving_all_reduce(int position, int size, Schedule* steps);
void two_level_all_reduce(int position, int size, int local_size, Schedule* steps);

// Returns the positions with which this one may exchange messages in a collective of its group.
std::vector<int> partners(int position, int size, int local_size);

}  // namespace tfring
