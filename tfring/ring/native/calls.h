// Calls of a rank, as it counts them with each other rank, and as the others tell of theirs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "frame.h"
#include "group.h"

namespace tfring {

// The calls of a peer, as it has reported them.
struct Report {
  uint64_t begun = 0;  // calls with this rank
  Pong pong{};
};

// Calls that this rank has begun. It and each other rank count those that both are in alike: all of them, and
// of these the sends and the receives. So a rank that gives up can tell each peer in which of their calls,
// and a peer in an earlier one knows that all it needs to finish that one has been sent. Knows no
// connections.
class Calls {
 public:
  Calls(int rank, int world_size);

  // Counts the call that is about to begin, and returns its sequence.
  uint64_t count(Kind kind, int root, Group* group);
  void begin(const CallHeader& header);
  void end() { is_running_ = false; }

  bool is_running() const { return is_running_; }
  bool has_begun_any() const { return num_calls_ > 0; }
  const CallHeader& header() const { return header_; }  // of the call begun last
  bool takes_part(int rank) const { return in_call_[static_cast<size_t>(rank)] != 0; }
  uint64_t common(int rank) const { return counts_[static_cast<size_t>(rank)]; }
  // Returns the number of the collective under way among those with that rank; 0 if there is none.
  uint64_t asked_number(int rank) const;
  // Tells that rank, which asked while in the collective of that number.
  void tell(int rank, uint64_t asked, Pong* pong) const;

  // Compare the call under way with what a peer has reported.
  bool has_begun(int rank, const Report& report) const;
  const CallHeader* contradiction(int rank, const Report& report) const;
  std::string follow(int rank, const Report& report);

 private:
  // A collective that was begun.
  struct Past {
    CallHeader header{};
    std::vector<uint64_t> numbers;  // [rank]: its number among the collectives with that rank; 0 without it
  };

  uint64_t num_collectives(int rank) const;
  bool is_in_another(int rank, const Report& report) const;

  const int rank_;
  std::vector<uint64_t> counts_;    // [rank]: calls begun together with it,
  std::vector<uint64_t> num_sent_;  // of these the sends to it, and the receives from it
  std::vector<uint64_t> num_received_;
  std::vector<uint8_t> in_call_;  // [rank]: it takes part in the call begun last
  uint64_t num_calls_ = 0;        // begun, of any group
  bool is_running_ = false;       // the call begun last is under way
  CallHeader header_{};
  std::array<Past, 8> past_;  // the collectives begun last
  size_t num_past_ = 0;
  uint32_t num_chain_ = 0;  // of this rank's pongs: for whom the call under way waits in the end
  decltype(Pong::chain) chain_{};
};

}  // namespace tfring
