// Groups of a world's ranks.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "settings.h"

namespace tfring {

// Bytes that the last sum of rows moved, of all members together; see choose_row_sums.
struct Observed {
  uint64_t key = 0;
  int64_t sent = 0;
  int64_t summed = 0;
};

// Some of a world's ranks. They share its links, threads, failures and order of calls.
struct Group {
  std::string name;
  bool is_world = false;  // the group of all ranks, made with the world
  uint64_t identity = 0;
  std::vector<int> ranks;  // [member]
  int member = 0;          // this rank
  std::vector<int> order;  // [position]: rank; ordered by host, so that few edges of a ring cross the network
  std::vector<int> member_at;  // [position]
  int position = 0;
  int local_size = 1;               // members on each host; 0 if hosts differ
  uint64_t sequence = 0;            // of the last begun collective
  std::array<Observed, 64> seen{};  // by key; of two keys with one place, the later

  int size() const { return static_cast<int>(ranks.size()); }
  int rank_of(int of_member) const { return ranks[static_cast<size_t>(of_member)]; }
  int position_of(int of_member) const;
};

std::shared_ptr<Group> make_group_of_all(const Settings& settings);
// `members` are numbers of the parent's members. All ranks that make the group agree on its identity.
std::shared_ptr<Group> make_group(const Settings& settings, const Group& parent, const int32_t* members,
                                  int num_members, const char* name);

}  // namespace tfring
