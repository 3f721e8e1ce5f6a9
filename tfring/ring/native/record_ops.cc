// A record: its length as uint64, the length's checksum, the data, the data's checksum.
#include "record_ops.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "invocation.h"

namespace tfring {
namespace {

constexpr int64_t kHeader = sizeof(uint64_t) + sizeof(uint32_t);
constexpr int64_t kFooter = sizeof(uint32_t);
constexpr size_t kColumns = 3;  // of an entry: number of the file, offset of the record, length of its data

// Computes CRC-32C, eight bytes at a time, with eight tables.
class Tables {
 public:
  Tables() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) * 0x82f63b78u);
      of_[0][i] = crc;
    }
    for (size_t t = 1; t < 8; ++t) {
      for (size_t i = 0; i < 256; ++i) of_[t][i] = (of_[t - 1][i] >> 8) ^ of_[0][of_[t - 1][i] & 255];
    }
  }
  uint32_t extend(uint32_t crc, const unsigned char* data, size_t size) const {
    for (; size >= 8; size -= 8, data += 8) {
      uint32_t next = 0;
      for (size_t i = 0; i < 4; ++i) next ^= of_[7 - i][data[i] ^ ((crc >> (8 * i)) & 255)];
      for (size_t i = 4; i < 8; ++i) next ^= of_[7 - i][data[i]];
      crc = next;
    }
    for (; size > 0; --size, ++data) crc = (crc >> 8) ^ of_[0][(crc ^ *data) & 255];
    return crc;
  }

 private:
  std::array<std::array<uint32_t, 256>, 8> of_;
};

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t extend_by_instruction(uint32_t crc, const unsigned char* data,
                                                                 size_t size) {
  uint64_t wide = crc;
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof(word));
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; size > 0; --size, ++data) crc = __builtin_ia32_crc32qi(crc, *data);
  return crc;
}
#endif

// Returns the checksum as stored in files: rotated, with a number added, because data may contain checksums.
uint32_t checksum(const char* data, size_t size) {
  static const Tables tables;
  const auto* bytes = reinterpret_cast<const unsigned char*>(data);
  uint32_t crc = ~0u;
#ifdef __x86_64__
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  crc = has_instruction ? extend_by_instruction(crc, bytes, size) : tables.extend(crc, bytes, size);
#else
  crc = tables.extend(crc, bytes, size);
#endif
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

template <typename T>
T number_at(const char* bytes) {  // in the byte order of the host, as in TensorFlow
  T number{};
  std::memcpy(&number, bytes, sizeof(number));
  return number;
}

std::string text_of(const TF_Tensor* texts, size_t index) {
  const auto* text = static_cast<const TF_TString*>(tf.TF_TensorData(texts)) + index;
  return {tf.TF_StringGetDataPointer(text), tf.TF_StringGetSize(text)};
}

// A file that is read at offsets. Its first failure is that of the call.
class File {
 public:
  File(std::string path, Invocation* invocation)
      : path_(std::move(path)), invocation_(invocation), fd_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat about {};
    if (fd_ < 0 || fstat(fd_, &about) != 0) {
      invocation_->fail(errno == ENOENT ? kTfNotFound : kTfInternal, path_ + ": " + std::strerror(errno));
    }
    size_ = about.st_size;
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }

  bool read(int64_t offset, char* to, int64_t count) {
    while (invocation_->ok() && count > 0) {
      const ssize_t got = pread(fd_, to, static_cast<size_t>(count), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) invocation_->fail(kTfInternal, path_ + ": " + std::strerror(errno));
      if (got == 0) broken("truncated", offset);
      offset += got;
      to += got;
      count -= got;
    }
    return invocation_->ok();
  }

  void broken(const char* how, int64_t offset) {
    invocation_->fail(kTfDataLoss,
                      std::string(how) + " record at " + std::to_string(offset) + " of " + path_);
  }

 private:
  std::string path_;
  Invocation* invocation_;
  int fd_;
  int64_t size_ = 0;
};

// Returns the length of the record at `offset` with this header; below 0, with a failure, if there is none.
int64_t length_of(File* file, int64_t offset, const char* header) {
  const auto length = number_at<uint64_t>(header);
  if (number_at<uint32_t>(header + sizeof(length)) != checksum(header, sizeof(length))) {
    file->broken("corrupted", offset);
  } else if (length > static_cast<uint64_t>(file->size() - offset - kHeader - kFooter)) {
    file->broken("truncated", offset);
  } else {
    return static_cast<int64_t>(length);
  }
  return -1;
}

}  // namespace

void index_records(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* path = invocation.input(0);
  if (!invocation.ok()) return;
  File file(text_of(path, 0), &invocation);
  std::vector<int64_t> found;
  char bytes[kFooter + kHeader] = {};  // the end of one record, and the beginning of the next
  for (int64_t offset = 0; invocation.ok() && offset < file.size();) {
    if (file.size() - offset < kHeader + kFooter) return file.broken("truncated", offset);
    if (offset == 0 && !file.read(0, bytes + kFooter, kHeader)) return;
    const int64_t length = length_of(&file, offset, bytes + kFooter);
    if (length < 0) return;
    const int64_t end = offset + kHeader + length;
    if (!file.read(end, bytes, std::min<int64_t>(sizeof(bytes), file.size() - end))) return;
    found.insert(found.end(), {offset, length, number_at<uint32_t>(bytes)});
    offset = end + kFooter;
  }
  if (!invocation.ok()) return;
  void* output = invocation.allocate(0, static_cast<TfDataType>(DType::kInt64),
                                     {static_cast<int64_t>(found.size() / kColumns), kColumns});
  if (invocation.ok() && !found.empty()) std::memcpy(output, found.data(), found.size() * sizeof(int64_t));
}

void read_records(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* paths = invocation.input(0);
  const TF_Tensor* sizes = invocation.input(1);
  const TF_Tensor* places = invocation.input(2);
  if (!invocation.ok()) return;
  const size_t count = tf.TF_TensorByteSize(places) / (kColumns * sizeof(int64_t));
  const size_t num_files = tf.TF_TensorByteSize(sizes) / sizeof(int64_t);
  auto* texts = static_cast<TF_TString*>(invocation.allocate(0, kTfString, {static_cast<int64_t>(count)}));
  std::vector<std::unique_ptr<File>> files(num_files);
  std::vector<char> bytes;
  const auto* entry = static_cast<const int64_t*>(tf.TF_TensorData(places));
  for (size_t i = 0; invocation.ok() && i < count; ++i, entry += kColumns) {
    const auto number = static_cast<size_t>(entry[0]);
    const int64_t offset = entry[1];
    if (number >= num_files)
      return invocation.fail(kTfInvalidArgument, "an entry has the number of a file that does not exist");
    std::unique_ptr<File>& file = files[number];
    if (file == nullptr) {
      file = std::make_unique<File>(text_of(paths, number), &invocation);
      if (!invocation.ok()) return;
      if (file->size() != static_cast<const int64_t*>(tf.TF_TensorData(sizes))[number]) {
        return invocation.fail(kTfDataLoss, file->path() +
                                                " has changed since its records were counted. Make the "
                                                "dataset again.");
      }
    }
    bytes.resize(static_cast<size_t>(kHeader + entry[2] + kFooter));
    if (!file->read(offset, bytes.data(), static_cast<int64_t>(bytes.size()))) return;
    const auto length = static_cast<size_t>(entry[2]);
    const char* data = bytes.data() + kHeader;
    if (length_of(file.get(), offset, bytes.data()) != entry[2] ||
        number_at<uint32_t>(data + length) != checksum(data, length)) {
      return file->broken("corrupted", offset);
    }
    tf.TF_StringCopy(&texts[i], data, length);
  }
}

}  // namespace tfring
