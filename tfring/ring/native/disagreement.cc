// Ranks that wait for each other, told from those that wait for a slow one by what the peers say of their
// calls.
#include <algorithm>

#include "clock.h"
#include "process.h"
#include "world.h"

namespace tfring {
namespace {

constexpr double kIdleShare = 0.03;  // of a processor, used by a process that does nothing but wait

}  // namespace

std::string World::disagreement(int rank, const CallHeader& theirs) const {
  return "ranks disagree: rank " + std::to_string(rank) + " called " + describe(theirs) + " as " +
         describe_place(theirs) + " of ring \"" + name_ + "\", rank " + std::to_string(rank_) + " called " +
         describe(header_) + " as " + describe_place(header_);
}

// Fails with what the peer's header says, unless its control connection says more: a peer that gave up in
// this call has told why before it went on.
Status World::report_disagreement(Link* link) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  read_control(link, now_nanoseconds());
  if (!failure_.ok()) return failure_;
  return break_up({Code::kMismatch, disagreement(link->rank, link->their_header)});
}

// Returns whether the peer has begun its part of the call under way, as far as it has reported.
bool World::has_begun(const Link& peer) const {
  const size_t rank = static_cast<size_t>(peer.rank);
  const Kind kind = static_cast<Kind>(header_.kind);
  if (kind == Kind::kSend) return peer.pong.num_received >= num_sent_[rank];
  if (kind == Kind::kReceive) return peer.pong.num_sent >= num_received_[rank];
  return peer.begun - peer.pong.num_sent - peer.pong.num_received >=
         counts_[rank] - num_sent_[rank] - num_received_[rank];
}

// Returns how many collectives this rank has begun together with that one.
uint64_t World::num_collectives(int rank) const {
  const size_t r = static_cast<size_t>(rank);
  return counts_[r] - num_sent_[r] - num_received_[r];
}

// Keeps the collective that begins, for the ranks that ask of it once it is over.
void World::remember() {
  Past& past = past_[num_past_++ % past_.size()];
  past.header = header_;
  for (int r = 0; r < world_size_; ++r) {
    past.numbers[static_cast<size_t>(r)] = takes_part(r) ? num_collectives(r) : 0;
  }
}

// Returns the number of the collective under way among those with that rank; 0 if there is none.
uint64_t World::asked_number(int rank) const {
  const bool is_with_it = running_ && takes_part(rank) && !is_pairwise(static_cast<Kind>(header_.kind));
  return is_with_it ? num_collectives(rank) : 0;
}

// Returns the peer's call with this rank that is another than the one under way; null if there is none. Both
// count what they have begun together: collectives, sends and receives each. So collectives of one number
// have to agree, also one that the peer is through with; and where one of the calls is a send or a receive,
// which need not keep step, neither rank has begun the other's, nor can it.
const CallHeader* World::contradiction(const Link& peer) const {
  const Pong& pong = peer.pong;
  const uint64_t asked = asked_number(peer.rank);
  if (asked != 0 && pong.past_number == asked && !agree(header_, pong.past)) return &pong.past;
  return is_in_another(peer) ? &pong.header : nullptr;
}

bool World::is_in_another(const Link& peer) const {
  const Pong& pong = peer.pong;
  if (pong.is_with_you == 0) return false;
  const size_t rank = static_cast<size_t>(peer.rank);
  const Kind mine = static_cast<Kind>(header_.kind);
  const Kind theirs = static_cast<Kind>(pong.header.kind);
  const uint64_t my_number = num_collectives(peer.rank);
  const uint64_t their_number = peer.begun - pong.num_sent - pong.num_received;
  if (!is_pairwise(mine) && !is_pairwise(theirs)) {
    return my_number == their_number && !agree(header_, pong.header);
  }
  if (pong.is_running == 0 || has_begun(peer)) return false;
  if (theirs == Kind::kReceive) return pong.num_received > num_sent_[rank];
  if (theirs == Kind::kSend) return pong.stands_still != 0 && pong.num_sent > num_received_[rank];
  return their_number > my_number;
}

// A peer that has not begun this rank's call is in one of its own, and cannot begin this one before. Ranks
// that wait so for each other in a row are told from one to the next; a row that comes back to this rank's
// call never ends. One that is in the same call waits for what this rank waits for.
Status World::follow(const Link& peer) {
  const Pong& pong = peer.pong;
  if (pong.is_running == 0) return {};
  uint32_t length = 0;
  decltype(Pong::chain) chain;
  if (!has_begun(peer)) {
    chain[length++] = {peer.rank, static_cast<uint32_t>(pong.call)};
  } else if (pong.is_with_you == 0 || is_pairwise(static_cast<Kind>(header_.kind)) ||
             !agree(header_, pong.header)) {
    return {};
  }
  for (uint32_t i = 0; i < pong.num_chain && length < kMostChain; ++i) chain[length++] = pong.chain[i];
  if (length == 0) return {};
  std::copy_n(chain, length, chain_);
  num_chain_ = length;
  const auto end = chain + length;
  const auto mine = std::find_if(chain, end, [this](const auto& one) { return one.rank == rank_; });
  if (mine == end || mine == chain) return {};
  if (mine->call != static_cast<uint32_t>(num_calls_)) {  // of a call that is over
    num_chain_ = 0;
    return {};
  }
  std::string row = "rank " + std::to_string(rank_) + " waits for";
  for (const auto* one = chain; one != mine; ++one) {
    const std::string rank = " rank " + std::to_string(one->rank);
    row += rank + "," + rank + " for";
  }
  row += " rank " + std::to_string(rank_);
  return break_up({Code::kMismatch,
                   "ranks disagree: they wait for each other in a circle, each in a call that the "
                   "next has not begun: " +
                       row + ". " + disagreement(peer.rank, pong.header)});
}

// The peer has not begun this rank's collective, and its process waits in another ring, in one that this
// process has not begun. Either may have a thread that still computes, and then begins what the other waits
// for; but where neither uses a processor for as long as a slow rank is not warned of, they disagree.
Status World::wait_crosswise(const Link& peer, int64_t now) {
  const uint64_t other = of_all_ ? waits_elsewhere(peer.pong) : 0;
  const bool is_open = elsewhere_since_ > idle_since_;
  const double seconds = is_open ? seconds_between(elsewhere_since_, now) : 0;
  const int64_t used[2] = {cpu_nanoseconds(), peer.pong.cpu_nanoseconds};
  const auto computes = [&](int process) {
    return static_cast<double>(used[process] - used_[process]) * 1e-9 > kIdleShare * (1 + seconds);
  };
  if (other == 0) {
    elsewhere_since_ = 0;
    return {};
  }
  if (!is_open || other != elsewhere_ || computes(0) || computes(1)) {
    elsewhere_ = other;
    elsewhere_since_ = now;
    std::copy_n(used, 2, used_);
  }
  if (seconds_between(elsewhere_since_, now) < stall_seconds_) return {};
  crosses_ = true;
  const std::string who = "rank " + std::to_string(peer.rank);
  const std::string me = "rank " + std::to_string(rank_);
  return break_up({Code::kMismatch,
                   "ranks disagree: " + who + " and " + me +
                       " wait for each other in different rings, and neither computes: " + me + " in " +
                       here() + ", " + who + " in ring \"" + name_of_ring(elsewhere_) +
                       "\"; the last it called in ring \"" + name_ + "\" is " + describe(peer.pong.header) +
                       ". All ranks call the collectives of all rings in one order, also where one "
                       "catches an error that the others do not get"});
}

}  // namespace tfring
