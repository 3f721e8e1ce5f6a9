// Memory that is reused between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace tfring {

class Memory {
 public:
  // Allocates memory if there is less, and drops the content. Returns false if there is none.
  bool reserve(int64_t size) {
    if (size_ >= size) return true;
    bytes_.reset();
    size_ = 0;
    bytes_.reset(new (std::nothrow) char[static_cast<size_t>(size)]);
    if (bytes_ != nullptr) size_ = size;
    return bytes_ != nullptr;
  }
  char* get() const { return bytes_.get(); }
  int64_t size() const { return size_; }

 private:
  std::unique_ptr<char[]> bytes_;
  int64_t size_ = 0;
};

}  // namespace tfring
