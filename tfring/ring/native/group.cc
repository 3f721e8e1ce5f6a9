// The order of a group's members.
#include "group.h"

#include <algorithm>

namespace tfring {
namespace {

constexpr uint64_t kMixer = 0x9e3779b97f4a7c15u;
uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kMixer;
  return hash ^ (hash >> 31);
}

// Orders the members of a group, with those of a host adjacent.
void assign_hosts(const std::vector<int32_t>& hosts, Group* group) {
  const auto host_of = [&](int member) { return hosts[static_cast<size_t>(group->rank_of(member))]; };
  for (int m = 0; m < group->size(); ++m) group->member_at.push_back(m);
  std::stable_sort(group->member_at.begin(), group->member_at.end(),
                   [&](int a, int b) { return host_of(a) < host_of(b); });
  std::vector<int> sizes;  // number of members of each host
  for (int p = 0; p < group->size(); ++p) {
    const int member = group->member_at[static_cast<size_t>(p)];
    group->order.push_back(group->rank_of(member));
    if (p == 0 || host_of(member) != host_of(group->member_at[static_cast<size_t>(p - 1)]))
      sizes.push_back(0);
    ++sizes.back();
  }
  group->position = group->position_of(group->member);
  const bool alike = std::all_of(sizes.begin(), sizes.end(), [&](int size) { return size == sizes[0]; });
  group->local_size = alike ? sizes[0] : 0;
}

}  // namespace

int Group::position_of(int of_member) const {
  return static_cast<int>(std::find(member_at.begin(), member_at.end(), of_member) - member_at.begin());
}

std::shared_ptr<Group> make_group_of_all(const Settings& settings) {
  auto all = std::make_shared<Group>();
  all->name = settings.name;
  all->is_world = true;
  all->identity = settings.identity;
  for (int r = 0; r < settings.world_size; ++r) all->ranks.push_back(r);
  all->member = settings.rank;
  all->sequence = UINT64_MAX;  // the opening barrier is collective 0, the user's first is 1
  assign_hosts(settings.hosts, all.get());
  return all;
}

std::shared_ptr<Group> make_group(const Settings& settings, const Group& parent, const int32_t* members,
                                  int num_members, const char* name) {
  auto made = std::make_shared<Group>();
  made->name = name;
  made->identity = mix(parent.identity, 1);
  for (const char* at = name; *at != '\0'; ++at)
    made->identity = mix(made->identity, static_cast<unsigned char>(*at));
  made->member = -1;
  for (int m = 0; m < num_members; ++m) {
    made->identity = mix(made->identity, static_cast<uint64_t>(members[m]));
    made->ranks.push_back(parent.rank_of(members[m]));
    if (made->ranks.back() == settings.rank) made->member = m;
  }
  assign_hosts(settings.hosts, made.get());
  return made;
}

}  // namespace tfring
