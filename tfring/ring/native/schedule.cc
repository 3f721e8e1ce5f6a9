// The tables that schedule.py documents; the tests contain them as well.
#include "schedule.h"

#include <algorithm>

namespace tfring {
namespace {

int wrap(int value, int size) { return ((value % size) + size) % size; }

// Returns the distance from a member of a binomial tree, numbered from the root, to its parent. The distances
// to its children are half of that, a quarter, and so on.
int tree_reach(int member, int size) {
  int reach = 1;
  while (reach < size && (member & reach) == 0) reach *= 2;
  return reach;
}

}  // namespace

Algorithm choose_small(Algorithm wanted, int size) {
  if (wanted == Algorithm::kBruck || wanted == Algorithm::kFlat) {
    if (wanted == Algorithm::kBruck || size <= kFlatMembers) return wanted;
  }
  return size <= kFlatMembers ? Algorithm::kFlat : Algorithm::kBruck;
}

Algorithm choose_all_reduce(Algorithm wanted, int64_t num_bytes, int size, int local_size) {
  const bool two_level = local_size > 1 && local_size < size;
  if (wanted == Algorithm::kTwoLevel) return two_level ? wanted : Algorithm::kRing;
  if (wanted == Algorithm::kRing || wanted == Algorithm::kHalving) return wanted;
  if (wanted != Algorithm::kAuto || is_small(num_bytes, size)) return choose_small(wanted, size);
  if (two_level) return Algorithm::kTwoLevel;
  const bool waits_long = size > kFlatMembers || (local_size <= 1 && size > 2);
  const int64_t most = local_size == 0 ? kHalvingSharedBytes : kHalvingBytes;
  return waits_long && num_bytes / size <= most ? Algorithm::kHalving : Algorithm::kRing;
}

Algorithm choose_rooted(int64_t num_bytes, int size) {
  if (size <= kFlatMembers) return is_small(num_bytes, size) ? Algorithm::kFlat : Algorithm::kRing;
  return num_bytes / size <= kTreeBytes ? Algorithm::kTree : Algorithm::kRing;
}

Algorithm choose_all_gather(int64_t num_bytes) {
  return is_small(num_bytes, 1) ? Algorithm::kBruck : Algorithm::kRing;
}

// "gather": a member sends (N - 1) / N of `sent`. "owner": it sends 1 / N of that, and the sums, (N - 1) / N
// of `summed`. The second exchange costs a delay, which counts as kSmallBytes.
Algorithm choose_row_sums(Algorithm wanted, int64_t sent, int64_t summed, int size) {
  if (wanted == Algorithm::kGather || wanted == Algorithm::kOwner) return wanted;
  const int64_t saved = (sent - sent / size - summed) / size * (size - 1);
  return saved > kSmallBytes ? Algorithm::kOwner : Algorithm::kGather;
}

void ring_all_reduce(int position, int size, Schedule* steps) {
  steps->clear();
  for (int s = 0; s < 2 * (size - 1); ++s) {
    steps->push_back({wrap(position + 1, size), wrap(position - s, size), wrap(position - 1, size),
                      wrap(position - s - 1, size), s < size - 1});
  }
}

void ring_all_gather(int position, int size, Schedule* steps) {
  steps->clear();
  for (int s = 0; s < size - 1; ++s) {
    steps->push_back({wrap(position + 1, size), wrap(position - s, size), wrap(position - 1, size),
                      wrap(position - s - 1, size), false});
  }
}

void ring_reduce_scatter(int position, int size, Schedule* steps) {
  steps->clear();
  for (int s = 0; s < size - 1; ++s) {
    steps->push_back({wrap(position + 1, size), wrap(position - s - 1, size), wrap(position - 1, size),
                      wrap(position - s - 2, size), true});
  }
}

// Chunk 0 is the full buffer, chunk 1 the acknowledgement of the last member to the root.
void ring_broadcast(int position, int size, int root, Schedule* steps) {
  steps->clear();
  const int next = wrap(position + 1, size);
  const int previous = wrap(position - 1, size);
  if (size == 1) return;
  if (position == root) {
    steps->push_back({next, 0, -1, -1, false});
    steps->push_back({-1, -1, previous, 1, false});
  } else {
    steps->push_back({-1, -1, previous, 0, false});
    steps->push_back({next, next == root ? 1 : 0, -1, -1, false});
  }
}

void ring_reduce(int position, int size, int root, Schedule* steps) {
  steps->clear();
  const int next = wrap(position + 1, size);
  const int previous = wrap(position - 1, size);
  if (size > 1 && previous != root) steps->push_back({-1, -1, previous, 0, true});
  if (size > 1 && position != root) steps->push_back({next, 0, -1, -1, false});
}

// Chunk 0 is the full buffer, chunk 1 the acknowledgement of a member and of all members below it.
void tree_broadcast(int position, int size, int root, Schedule* steps) {
  steps->clear();
  const int member = wrap(position - root, size);
  const int reach = tree_reach(member, size);
  const int parent = wrap(position - reach, size);
  if (member > 0) steps->push_back({-1, -1, parent, 0, false});
  for (int distance = reach / 2; distance > 0; distance /= 2) {
    if (member + distance < size) steps->push_back({wrap(position + distance, size), 0, -1, -1, false});
  }
  for (int distance = reach / 2; distance > 0; distance /= 2) {
    if (member + distance < size) steps->push_back({-1, -1, wrap(position + distance, size), 1, true});
  }
  if (member > 0) steps->push_back({parent, 1, -1, -1, false});
}

void tree_reduce(int position, int size, int root, Schedule* steps) {
  steps->clear();
  const int member = wrap(position - root, size);
  const int reach = tree_reach(member, size);
  for (int distance = 1; distance < reach; distance *= 2) {
    if (member + distance < size) steps->push_back({-1, -1, wrap(position + distance, size), 0, true});
  }
  if (member > 0) steps->push_back({wrap(position - reach, size), 0, -1, -1, false});
}

void flat_all_gather(int position, int size, Schedule* steps) {
  steps->clear();
  for (int s = 1; s < size; ++s) {
    const int from = wrap(position - s, size);
    steps->push_back({wrap(position + s, size), position, from, from, false});
  }
}

void flat_broadcast(int position, int size, int root, Schedule* steps) {
  steps->clear();
  for (int s = 1; s < size && position == root; ++s) {
    const int other = wrap(position + s, size);
    steps->push_back({other, 0, other, 1, false});
  }
  if (position == root) return;
  steps->push_back({-1, -1, root, 0, false});
  steps->push_back({root, 1, -1, -1, false});
}

void bruck_all_gather(int position, int size, Schedule* steps) {
  steps->clear();
  for (int distance = 1; distance < size; distance *= 2) {
    for (int j = 0; j < std::min(distance, size - distance); ++j) {
      steps->push_back({wrap(position + distance, size), wrap(position - j, size),
                        wrap(position - distance, size), wrap(position - distance - j, size), false});
    }
  }
}

int halving_chunks(int size) {
  int chunks = 1;
  while (2 * chunks <= size) chunks *= 2;
  return chunks;
}

// The chunks of a round are sent in the order in which the next round passes them on.
void halving_all_reduce(int position, int size, Schedule* steps) {
  steps->clear();
  const int core = halving_chunks(size);
  if (position >= core) {
    const int peer = position - core;
    for (int j = core - 1; j >= 0; --j) steps->push_back({peer, peer ^ j, -1, -1, false});
    for (int j = 0; j < core; ++j) steps->push_back({-1, -1, peer, peer ^ j, false});
    return;
  }
  const int extra = position + core < size ? position + core : -1;
  for (int j = core - 1; j >= 0 && extra >= 0; --j) steps->push_back({-1, -1, extra, position ^ j, true});
  for (int distance = core / 2; distance > 0; distance /= 2) {
    const int peer = position ^ distance;
    for (int j = distance - 1; j >= 0; --j) steps->push_back({peer, peer ^ j, peer, position ^ j, true});
  }
  for (int distance = 1; distance < core; distance *= 2) {
    const int peer = position ^ distance;
    for (int j = 0; j < distance; ++j) steps->push_back({peer, position ^ j, peer, peer ^ j, false});
  }
  for (int j = 0; j < core && extra >= 0; ++j) steps->push_back({extra, position ^ j, -1, -1, false});
}

// Chunk l * hosts + h is part h of the sum of local members l of the hosts.
void two_level_all_reduce(int position, int size, int local_size, Schedule* steps) {
  const int num_hosts = size / local_size;
  const int host = position / local_size;
  const int local = position % local_size;
  const int next = host * local_size + wrap(local + 1, local_size);
  const int previous = host * local_size + wrap(local - 1, local_size);
  steps->clear();
  // Parts in the order in which the rings across hosts need and return them.
  for (int s = 0; s < local_size - 1; ++s) {
    for (int k = 0; k < num_hosts; ++k) {
      const int h = wrap(host - k, num_hosts);
      steps->push_back({next, wrap(local - s - 1, local_size) * num_hosts + h, previous,
                        wrap(local - s - 2, local_size) * num_hosts + h, true});
    }
  }
  for (int s = 0; s < 2 * (num_hosts - 1); ++s) {
    steps->push_back({wrap(host + 1, num_hosts) * local_size + local,
                      local * num_hosts + wrap(host - s, num_hosts),
                      wrap(host - 1, num_hosts) * local_size + local,
                      local * num_hosts + wrap(host - s - 1, num_hosts), s < num_hosts - 1});
  }
  for (int s = 0; s < local_size - 1; ++s) {
    for (int k = 0; k < num_hosts; ++k) {
      const int h = wrap(host + 1 - k, num_hosts);
      steps->push_back({next, wrap(local - s, local_size) * num_hosts + h, previous,
                        wrap(local - s - 1, local_size) * num_hosts + h, false});
    }
  }
}

std::vector<int> partners(int position, int size, int local_size) {
  std::vector<int> found;
  for (int other = 0; other < size; ++other) {
    if (other != position && size <= kFlatMembers) found.push_back(other);
  }
  if (size <= kFlatMembers) return found;
  for (int distance = 1; distance < size; distance *= 2) {
    found.push_back(wrap(position + distance, size));
    found.push_back(wrap(position - distance, size));
  }
  if (local_size > 1) {
    const int host = position / local_size;
    const int local = position % local_size;
    const int num_hosts = size / local_size;
    for (int step : {1, -1}) {
      found.push_back(host * local_size + wrap(local + step, local_size));
      found.push_back(wrap(host + step, num_hosts) * local_size + local);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  found.erase(std::remove(found.begin(), found.end(), position), found.end());
  return found;
}

}  // namespace tfring
