// Constant settings of a rank in its world.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core.h"
#include "schedule.h"

namespace tfring {

struct Settings {
  explicit Settings(const tfring_options& options)
      : name(options.name),
        identity(options.identity),
        rank(options.rank),
        world_size(options.world_size),
        host(options.host),
        num_spins(options.num_spins),
        algorithm(static_cast<Algorithm>(options.algorithm)),
        timeout_seconds(options.timeout_seconds),
        lost_seconds(options.lost_seconds),
        stall_seconds(options.stall_seconds),
        hosts(static_cast<size_t>(options.world_size)) {
    if (options.hosts != nullptr) hosts.assign(options.hosts, options.hosts + options.world_size);
  }

  const std::string name;
  const uint64_t identity;  // of the world, the same on all its ranks
  const int rank;
  const int world_size;
  const std::string host;
  const int num_spins;
  const Algorithm algorithm;
  const double timeout_seconds;
  const double lost_seconds;
  const double stall_seconds;
  std::vector<int32_t> hosts;  // [rank]: a number for its host
};

}  // namespace tfring
