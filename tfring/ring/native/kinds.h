// The collectives: their numbers, names and traits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core.h"

namespace tfring {

// The kinds of calls. The numbers are part of the C interface and of the wire format.
enum class Kind : uint8_t {
  kAllReduce = 0,
  kAllGather = 1,
  kReduceScatter = 2,  // outputs hold this rank's rows: tfring_chunk of the first dimension
  kBroadcast = 3,
  kBarrier = 4,   // without tensors
  kAllToAll = 5,  // counts[r * num_tensors + t] rows of tensor t go to rank r, in rank order
  kReduce = 6,    // only the root's outputs are written
  kGather = 7,    // only the root is asked for memory
  kScatter = 8,   // like kAllToAll, with rows from the root only; the others' counts and rows are ignored
  kSend = 9,      // one tensor
  kReceive = 10,  // one tensor, of which only the dtype is used; `allocate` gets its dimensions
  kAllReduceRows = 11,  // rows with ids: values of `num_tensors / 2` tables, then the ids of each, int32 or
                        // int64. Results have each id once, with the sum of all ranks' rows of it, in the
                        // same order on all ranks. `allocate` gets the number of ids in rank r's share, and
                        // for r = world_size the number of different ids of this rank
};

enum Trait : unsigned {
  kReduces = 1,
  kByRows = 2,      // tensors have rows
  kLearnsRows = 4,  // and their number may differ between ranks
  kHasRoot = 8,     // or a peer
  kIsPairwise = 16,
};

struct KindInfo {
  const char* name;
  unsigned traits;
};

// In the order of Kind.
constexpr KindInfo kKinds[] = {
    {"all_reduce", kReduces},
    {"all_gather", kByRows | kLearnsRows},
    {"reduce_scatter", kReduces | kByRows},
    {"broadcast", kHasRoot},
    {"barrier", 0},
    {"all_to_all", kByRows | kLearnsRows},
    {"reduce", kReduces | kHasRoot},
    {"gather", kByRows | kLearnsRows | kHasRoot},
    {"scatter", kByRows | kLearnsRows | kHasRoot},
    {"send", kHasRoot | kIsPairwise},
    {"receive", kHasRoot | kIsPairwise},
    {"all_reduce_rows", kByRows | kLearnsRows},
    {"unknown collective", 0},  // any other number, which a peer may send
};
constexpr int kNumKinds = static_cast<int>(sizeof(kKinds) / sizeof(kKinds[0])) - 1;
static_assert(kNumKinds == static_cast<int>(Kind::kAllReduceRows) + 1, "each kind has a row");
static_assert(kNumKinds <= TFRING_MOST_KINDS, "the statistics have a place for each");

inline const KindInfo& info_of(Kind kind) { return kKinds[std::min(static_cast<int>(kind), kNumKinds)]; }
inline const char* name_of(Kind kind) { return info_of(kind).name; }
inline bool reduces(Kind kind) { return (info_of(kind).traits & kReduces) != 0; }
inline bool by_rows(Kind kind) { return (info_of(kind).traits & kByRows) != 0; }
inline bool learns_rows(Kind kind) { return (info_of(kind).traits & kLearnsRows) != 0; }
inline bool has_root(Kind kind) { return (info_of(kind).traits & kHasRoot) != 0; }
inline bool is_pairwise(Kind kind) { return (info_of(kind).traits & kIsPairwise) != 0; }

}  // namespace tfring
