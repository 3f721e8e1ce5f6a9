// Records of the calls of this process: a fixed ring buffer, filled by calls and emptied by Python.
#include "trace.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "border.h"
#include "tensor.h"

namespace tfring {
namespace {

constexpr int64_t kBytesBeside = 4096;  // reading the CPU time takes microseconds

struct Records {
  std::mutex mutex;
  std::unique_ptr<tfring_record[]> kept;
  uint64_t capacity = 0;
  uint64_t added = 0;
  uint64_t taken = 0;
  int64_t lost = 0;
};

int64_t nanoseconds_of(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

int64_t other_threads() {
  return nanoseconds_of(CLOCK_PROCESS_CPUTIME_ID) - nanoseconds_of(CLOCK_THREAD_CPUTIME_ID);
}

Records* records = new Records;  // never destroyed: TensorFlow's threads outlive the end of main

// Keeps a record until it is taken, or counts it as lost if there is no room.
void keep_record(const tfring_record& record) {
  std::lock_guard<std::mutex> lock(records->mutex);
  if (records->added - records->taken >= records->capacity) {
    ++records->lost;
    return;
  }
  records->kept[records->added++ % records->capacity] = record;
}

}  // namespace

std::atomic<bool> trace_wanted{false};

void forget_trace_in_child() {
  trace_wanted = false;
  records = new Records;
}

void Record::fill(const Settings& settings, const Call& call, const tfring_call& arguments,
                  const tfring_tensor* tensors, int num_tensors, const tfring_statistics& so_far) {
  const Group& group = *call.group;
  record_ = tfring_record{};
  record_.kind = static_cast<int32_t>(call.header.kind);
  record_.last = -1;
  record_.bytes = num_bytes(tensors, num_tensors);
  const bool whole = arguments.compression == 0 || is_small(record_.bytes, group.size());
  if (call.kind() == Kind::kAllReduce && whole) {
    record_.algorithm = static_cast<int32_t>(
        choose_all_reduce(settings.algorithm, record_.bytes, group.size(), group.local_size));
  }
  if (call.kind() == Kind::kAllReduceRows) record_.algorithm = call.header.op;
  record_.sequence = call.header.sequence;
  record_.sent = -so_far.bytes_sent;
  record_.received = -so_far.bytes_received;
  copy_text(record_.ring, sizeof(record_.ring), settings.name.c_str());
  copy_text(record_.group, sizeof(record_.group), group.is_world ? "" : group.name.c_str());
  copy_text(record_.name, sizeof(record_.name), arguments.name);
  if (record_.bytes >= kBytesBeside) record_.beside = -other_threads();
  record_.begin = now_nanoseconds();
}

void Record::keep(const Status& status, const tfring_statistics& so_far) {
  record_.end = now_nanoseconds();
  if (record_.beside != 0) record_.beside = std::max<int64_t>(0, record_.beside + other_threads());
  record_.sent += so_far.bytes_sent;
  record_.received += so_far.bytes_received;
  if (record_.kind == static_cast<int32_t>(Kind::kReceive)) record_.bytes = record_.received;
  record_.code = static_cast<int32_t>(status.code);
  keep_record(record_);
}

}  // namespace tfring

using tfring::records;

void tfring_trace(int64_t capacity) {
  tfring::trace_wanted = false;
  tfring::at_border([&] {  // without memory, nothing is recorded
    std::lock_guard<std::mutex> lock(records->mutex);
    records->kept.reset(capacity > 0 ? new tfring_record[static_cast<size_t>(capacity)] : nullptr);
    records->capacity = static_cast<uint64_t>(std::max<int64_t>(capacity, 0));
    records->added = records->taken = 0;
    records->lost = 0;
    tfring::trace_wanted = capacity > 0;
  });
}

int64_t tfring_take_records(tfring_record* to, int64_t most, int64_t* lost) {
  std::lock_guard<std::mutex> lock(records->mutex);
  const int64_t count = std::min(static_cast<int64_t>(records->added - records->taken), most);
  for (int64_t i = 0; i < count; ++i) to[i] = records->kept[records->taken++ % records->capacity];
  *lost = records->lost;
  return count;
}

void tfring_mark(const char* name) {
  if (!tfring::trace_wanted) return;
  tfring_record record{};
  record.kind = TFRING_MARK;
  record.last = -1;
  record.begin = record.end = tfring::now_nanoseconds();
  tfring::copy_text(record.name, sizeof(record.name), name);
  tfring::keep_record(record);
}
