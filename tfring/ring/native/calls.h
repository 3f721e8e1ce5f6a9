// Calls of a rank, counted with each other rank, and the calls that the others report.
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

// Calls that this rank has begun. Each pair of ranks counts the calls that both take part in, in the same
// way: all of them, and the sends and the receives among them. So a rank that gives up can tell each peer in
// which of their calls it did, and a peer in an earlier call knows that all data it needs to finish has been
// sent. Knows no connections.
class Calls {
 public:
  Calls(int rank, int world_size);

  // Counts the call that is about to begin and returns its sequence number.
  uint64_t count(Kind kind, int root, Group* group);
  void begin(const CallHeader& header);
  void end() { is_running_ = false; }

  bool is_running() const { return is_running_; }
  bool has_begun_any() const { return num_calls_ > 0; }
  const CallHeader& header() const { return header_; }  // of the last begun call
  bool takes_part(int rank) const { return in_call_[static_cast<size_t>(rank)] != 0; }
  uint64_t common(int rank) const { return counts_[static_cast<size_t>(rank)]; }
  // Returns the number of the current collective among those with that rank; 0 if there is none.
  uint64_t asked_number(int rank) const;
  // Fills the answer to that rank, which asked while it was in the collective of that number.
  void tell(int rank, uint64_t asked, Pong* pong) const;

  // Compare the current call with the report of a peer.
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
  std::vector<uint64_t> counts_;    // [rank]: calls begun together with it
  std::vector<uint64_t> num_sent_;  // the sends to it among these, and the receives from it
  std::vector<uint64_t> num_received_;
  std::vector<uint8_t> in_call_;  // [rank]: it takes part in the last begun call
  uint64_t num_calls_ = 0;        // begun, of any group
  bool is_running_ = false;       // the last begun call is running
  CallHeader header_{};
  std::array<Past, 8> past_;  // the last begun collectives
  size_t num_past_ = 0;
  uint32_t num_chain_ = 0;  // of this rank's pongs: the ranks that the current call waits for in a row
  decltype(Pong::chain) chain_{};
};

}  // namespace tfring
