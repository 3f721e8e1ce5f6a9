// Peers that leave, die, stop or are cut off, and why the world broke.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "calls.h"
#include "core.h"
#include "frame.h"
#include "peer.h"
#include "settings.h"
#include "status.h"
#include "wake_event.h"
#include "watcher.h"

namespace tfring {

// Control connections, and the first failure, after which all calls fail. It is shared by the current call
// and the watcher's thread, so it is used through Guarded only.
class Liveness {
 public:
  Liveness(const Settings& settings, WakeEvent* wake_event);

  // Connections.
  void add(std::unique_ptr<Peer> peer) { peers_[static_cast<size_t>(peer->rank)] = std::move(peer); }
  // Tells a peer that joins an open world the messages it has missed. Fails once the world is closed.
  Status send_hello(Peer* peer);
  // To be called once the world is open: before, a peer may still be in Python, forming it.
  void start_asking(int64_t now);
  // See Watched.
  void hear(int rank, int64_t now);
  int watch(int64_t now, int64_t late, const Poll& poll);
  Peer* peer(int rank) const { return peers_[static_cast<size_t>(rank)].get(); }
  void ask(Peer* peer, int64_t now, double period);
  // Sends a closing frame and closes all connections. Returns false if this was done before.
  bool close();

  // Calls. Fails with the first failure, once it is set.
  Status check_usable() { return failure_.ok() ? Status() : refusal(); }
  Status begin(const CallHeader& header);
  void end(const Status& status);
  void tell_stands_still(bool stands) { stands_still_ = stands; }
  Calls& calls() { return calls_; }

  // Failures. Functions that break the world return the reason why calls fail from then on, or ok.
  Status failure() const;
  Status break_up(const Status& status);
  // Tells the peers that an error left a part of the program that all ranks run, such as model.fit. If all
  // ranks have an error, they can continue to use the ring.
  void tell_raised(const std::string& error);
  // Returns whether the peer has raised an error instead of beginning the current call, and this rank has
  // not.
  bool has_raised(const Peer& peer) const;
  // Breaks the world with that error.
  Status lose_to_its_error(const Peer& peer);
  Status interrupt(const Status& status);
  Status check_left();
  Status adopt_peer_failure();
  Status lose_dead(int rank);
  Status compare_calls(const Peer& peer);
  Status report_disagreement(int rank, const CallHeader& theirs, int64_t now);

 private:
  void read_control(Peer* peer, int64_t now);
  bool poll_for(Peer* peer, uint32_t events);
  void take_control(Peer* peer);
  void answer(Peer* peer);
  bool adopt_due_failures();
  Status lose(const Status& why);
  void pass_on(Peer* peer);
  Status refusal();

  std::string here() const { return describe_in(calls_.header(), settings_.name); }
  std::string during() const;
  Status died(const Peer& peer) const;
  Status cut_off(const Peer& peer, double seconds) const;
  Status silent(const Peer& peer, int64_t now) const;
  std::string disagreement(int rank, const CallHeader& theirs) const;

  const Settings& settings_;
  WakeEvent& wake_event_;
  Calls calls_;
  std::vector<std::unique_ptr<Peer>> peers_;  // [rank]; null if there is none
  Poll poll_;
  bool closed_ = false;
  Status failure_;                                 // calls fail with it once it is set
  bool broke_in_call_ = false;                     // it came during a call
  char failed_in_[sizeof(CallHeader::name)] = {};  // the name of that call
  bool interrupted_ = false;                       // on this rank: Ctrl-C, or no memory from the caller
  bool told_ = false;                              // failure_ has been reported to the caller
  bool stands_still_ = false;                      // the current call does
};

std::string seconds_text(double seconds);

}  // namespace tfring
