// Pages between memory and a file: asynchronous custom calls of XLA:CPU, and the same
// transfers as plain C functions.
//
// A transfer never outlives its memory, so none is ever cancelled. If another thunk of
// the execution fails, XLA:CPU starts no more thunks, but keeps arguments, results and
// arena until every thunk already started has completed. (In a sequence of few or small
// thunks XLA waits for each of them.)

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kSector = 4096;      // what direct transfers start and end at
constexpr int64_t kChunk = 2 << 20;    // the most that is moved by one system call
constexpr int kRecord = 6, kPlace = 4; // columns of the arrays in Python
using Table = ffi::Buffer<ffi::U32, 2>;
using Pair = ffi::Buffer<ffi::U32, 1>;

int64_t WholeSectors(int64_t n) { return (n + kSector - 1) / kSector * kSector; }

uint64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Stamp(uint32_t* to, uint64_t time) { to[0] = time, to[1] = time >> 32; }

// Per sector and lane of 64-bit words: the sum, and the sum of the running sums; then a
// hash of both, each step a bijection of the new word and of the old hash. It detects a
// changed word, swapped words and swapped sectors, before 64 bits fold into 32. It is
// much faster than the transfer.
class Checksum {
 public:
  // Adds [from, from + n), and copies it to `to` unless they are the same. Only the last
  // part may end within a sector.
  void Add(const char* from, char* to, int64_t n) {
    for (int64_t at = 0; at < n; at += kSector) {
      Words sums{}, weighted{};
      for (int64_t i = at; i < std::min(n, at + kSector); i += sizeof(Words)) {
        Words words{};
        int64_t size = std::min<int64_t>(n - i, sizeof words);
        if (size == sizeof words) {  // known to the compiler
          std::memcpy(&words, from + i, sizeof words);
          if (to != from) std::memcpy(to + i, &words, sizeof words);
        } else {
          std::memcpy(&words, from + i, size);
          if (to != from) std::memcpy(to + i, &words, size);
        }
        sums += words;
        weighted += sums;
      }
      for (int j = 0; j < 8; ++j)
        hashes_[j] = Mix(Mix(hashes_[j], sums[j]), weighted[j]);
    }
    size_ += n;
  }

  uint32_t Get() const {
    uint64_t all = size_;
    for (uint64_t hash : hashes_) all = Mix(all, hash);
    return (all ^ all >> 29) * kOdd >> 32;
  }

 private:
  using Words = uint64_t __attribute__((vector_size(64)));
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  static uint64_t Mix(uint64_t hash, uint64_t word) {
    return ((hash << 29 | hash >> 35) ^ word) * kOdd;
  }
  uint64_t hashes_[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  uint64_t size_ = 0;
};

std::string Reason(int error) { return std::generic_category().message(error); }

// Two sector-aligned chunks of memory, allocated when first needed.
struct Buffers {
  struct Free {
    void operator()(void* x) const { std::free(x); }
  };
  std::unique_ptr<void, Free> memory[2];
  int64_t size = 0;

  char* Get(int number, int64_t needed) {
    if (needed > size) {
      for (auto& x : memory) x.reset(std::aligned_alloc(kSector, needed));
      size = memory[0] && memory[1] ? needed : 0;
    }
    return size ? static_cast<char*>(memory[number].get()) : nullptr;
  }
};

// The flags of a place, as `place_of` in library.py has them.
constexpr uint32_t kDirect = 1, kUnknown = 2;
constexpr int kSkewBits = 8;  // above them, the bytes from the sector to the page

struct Page {
  bool out;
  int descriptor;
  bool direct;   // past the system's page cache
  bool checked;  // whether its checksum is known
  char* data;
  int64_t size, offset;
};

// Moves `size` bytes of a chunk; returns the error, empty if none. A direct transfer
// moves whole sectors; the last may reach beyond the page.
std::string MoveChunk(const Page& page, char* memory, int64_t size, int64_t offset) {
  int64_t whole = page.direct ? WholeSectors(size) : size;
  int64_t needed = page.out ? whole : size;
  for (int64_t done = 0; done < needed;) {
    ssize_t count =
        page.out ? pwrite(page.descriptor, memory + done, whole - done, offset + done)
                 : pread(page.descriptor, memory + done, whole - done, offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Reason(errno);
    // The rest of a short transfer must start at a sector.
    if (page.direct && done + count < needed) count -= count % kSector;
    if (count == 0 && !page.out)
      return "the file ends within " + std::to_string(size - done) + " bytes from " +
             std::to_string(offset + done) + " on";
    if (count == 0) return Reason(EIO);
    done += count;
  }
  return "";
}

// Moves a page; returns the error, empty if none. Checksums one chunk, and copies it if
// need be, while another is in transfer. A page-in may start within a sector.
std::string Move(const Page& page, Buffers& buffers, uint32_t* checksum) {
  const int64_t count = (page.size + kChunk - 1) / kChunk;
  auto size = [&](int64_t k) { return std::min(kChunk, page.size - k * kChunk); };
  auto data = [&](int64_t k) { return page.data + k * kChunk; };
  const int64_t skew = page.direct ? page.offset % kSector : 0;
  bool at_sectors = !skew && reinterpret_cast<uintptr_t>(page.data) % kSector == 0;
  auto memory = [&](int64_t k) {
    if (!page.direct || (at_sectors && size(k) % kSector == 0)) return data(k);
    return buffers.Get(k % 2, WholeSectors(std::min(kChunk, page.size) + skew));
  };
  if (count && (!memory(0) || !memory(count - 1))) return Reason(ENOMEM);

  Checksum sum;
  std::future<std::string> moving[2];
  auto start = [&](int64_t k) {
    auto move = [&, k] {
      return MoveChunk(page, memory(k), skew + size(k),
                       page.offset - skew + k * kChunk);
    };
    try {
      // A single chunk has nothing to overlap with.
      auto policy = count == 1 ? std::launch::deferred : std::launch::async;
      moving[k % 2] = std::async(policy, move);
    } catch (const std::system_error&) {  // no thread available
      moving[k % 2] = std::async(std::launch::deferred, move);
    }
  };
  auto wait = [&](int64_t k) {
    return moving[k % 2].valid() ? moving[k % 2].get() : std::string();
  };
  std::string error;
  if (page.out) {
    for (int64_t k = 0; k < count; ++k) {
      if (!(error = wait(k)).empty()) break;
      sum.Add(data(k), memory(k), size(k));
      if (page.direct && memory(k) != data(k))
        std::memset(memory(k) + size(k), 0, WholeSectors(size(k)) - size(k));
      start(k);
    }
    for (int64_t k = count; k < count + 2 && error.empty(); ++k) error = wait(k);
  } else {
    for (int64_t k = 0; k < std::min<int64_t>(2, count); ++k) start(k);
    for (int64_t k = 0; k < count; ++k) {
      if (!(error = wait(k)).empty()) break;
      sum.Add(memory(k) + skew, data(k), size(k));
      if (k + 2 < count) start(k + 2);
    }
  }
  for (auto& x : moving) x = {};  // waits for transfers in flight
  if (error.empty() && !page.direct && page.size) {
#if defined(__linux__)
    if (page.out && fdatasync(page.descriptor) && errno != EINVAL)
      error = Reason(errno);
    // Only what is on the disk can leave the cache.
    posix_fadvise(page.descriptor, page.offset, page.size, POSIX_FADV_DONTNEED);
#endif
  }
  *checksum = sum.Get();
  return error;
}

// `Move`, and for a page-in a check of the checksum; returns the user's error message,
// empty if none.
std::string Transfer(const Page& page, Buffers& buffers, std::string_view name,
                     uint32_t* checksum) {
  uint32_t expected = *checksum;
  std::string error = Move(page, buffers, checksum);
  if (error.empty() && page.checked && *checksum != expected)
    error = "the bytes are not those that were written";
  if (error.empty()) return "";
  std::string text = "'" + std::string(name) + "' (" + std::to_string(page.size) +
                     " bytes) could not be paged " + (page.out ? "out" : "in") + ": " +
                     error + ". ";
  text += page.out ? "Nothing else in its store was changed. "
                   : "No wrong bytes were used. ";
  if (fcntl(page.descriptor, F_GETFD) < 0)
    text += "Keep a store as long as a step that pages to it runs.";
  else if (page.out)
    text += "Free disk space, use FileStore(another_folder), or limit the plan with "
            "Budget(store_bytes=...).";
  else
    text += "Check the store's disk, or use FileStore(another_folder).";
  return text;
}

// Runs one transfer at a time, in the order of the requests.
//
// XLA continues the program on the thread that completes a future. So the thread in the
// lane hands further transfers to another thread before it completes one. A thread is
// started when none is idle: at most one more than XLA computes on at once. They inherit
// XLA's handling of denormal numbers.
class Lane {
 public:
  using Transfers = std::function<std::string(Buffers&)>;

  // The future fails with the message that `transfers` returns, if it has one.
  ffi::Future Put(Transfers transfers) {
    ffi::Promise promise;
    ffi::Future future(promise);
    std::lock_guard<std::mutex> lock(mutex_);
    to_do_.emplace_back(std::move(transfers), promise);
    if (!is_busy_ && !Wake()) {
      to_do_.pop_back();
      Complete(promise, "no thread could be started for paging.");
    }
    return future;
  }

  static void Complete(ffi::Promise& promise, const std::string& error) {
    if (error.empty()) promise.SetAvailable();
    else promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, "poet_jax: " + error));
  }

 private:
  // False if no thread is idle and none can be started.
  bool Wake() {
    if (!idle_) try {
      std::thread(&Lane::Work, this).detach();
      ++idle_;
    } catch (const std::system_error&) {
      return false;
    }
    waiting_.notify_one();
    return true;
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;; ++idle_) {
      auto is_free = [&] { return !is_busy_ && !to_do_.empty(); };
      waiting_.wait(lock, [&] { return is_free() || !done_.empty(); });
      --idle_;
      if (is_free()) {
        is_busy_ = true;
        do {
          auto [transfers, promise] = std::move(to_do_.front());
          to_do_.pop_front();
          lock.unlock();
          std::string error = transfers(buffers_);
          lock.lock();
          done_.emplace_back(promise, std::move(error));
        } while (!to_do_.empty() && Wake());
        is_busy_ = false;
      }
      while (!done_.empty()) {
        auto [promise, error] = std::move(done_.front());
        done_.pop_front();
        if (is_free() || !done_.empty()) Wake();
        lock.unlock();
        Complete(promise, error);
        lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable waiting_;
  std::deque<std::pair<Transfers, ffi::Promise>> to_do_;
  std::deque<std::pair<ffi::Promise, std::string>> done_;  // not yet reported to XLA
  Buffers buffers_;  // of the thread in the lane
  bool is_busy_ = false;
  int idle_ = 0;
};

Lane& TheLane() {
  static Lane* lane = new Lane;  // outlives its threads
  return *lane;
}

// Queues the transfer of `size` bytes at `data`, in `blocks` placed by the rows of
// `places` from `row` on. `written` holds the expected checksums: the records of a
// page-out, or `places` itself.
ffi::Future Start(bool out, void* data, int64_t size, Table places,
                  Table written, uint32_t* record, int64_t row, std::string_view name,
                  ffi::Span<const int64_t> blocks) {
  int64_t count = blocks.size(), total = 0;
  for (int64_t block : blocks) total += block;
  bool has_records = written.dimensions()[1] == kRecord;
  if (total != size || row < 0 || row + count > places.dimensions()[0] ||
      places.dimensions()[1] != kPlace ||
      (has_records && written.dimensions()[0] != count)) {
    ffi::Promise promise;
    ffi::Future future(promise);
    Lane::Complete(promise, "'" + std::string(name) + "' (" + std::to_string(size) +
                                " bytes) does not fit its blocks and places.");
    return future;
  }
  std::vector<std::pair<Page, uint32_t>> pages;
  char* start = static_cast<char*>(data);
  for (int64_t k = 0; k < count; ++k) {
    const uint32_t* place = places.typed_data() + (row + k) * kPlace;
    bool checked = !out && !(place[2] & kUnknown);
    Page page{out, static_cast<int>(place[0]), bool(place[2] & kDirect), checked, start,
              blocks[k], place[1] * kSector + (place[2] >> kSkewBits)};
    const uint32_t* record = written.typed_data() + k * kRecord;
    pages.emplace_back(page, has_records ? *record : place[3]);
    start += blocks[k];
  }
  return TheLane().Put([=, name = std::string(name), pages = std::move(pages)](
                           Buffers& buffers) mutable {
    uint32_t* to = record;
    for (auto& [page, checksum] : pages) {
      uint64_t begun = Now();
      std::string error = Transfer(page, buffers, name, &checksum);
      if (!error.empty()) return error;
      to[0] = checksum;
      Stamp(to + 1, begun);
      Stamp(to + 3, Now());
      to[5] = 0;
      to += kRecord;
    }
    return std::string();
  });
}

ffi::Future PageOut(ffi::AnyBuffer x, ffi::AnyBuffer, Table places,
                    ffi::Result<Table> record, int64_t row, std::string_view name,
                    ffi::Span<const int64_t> blocks) {
  return Start(true, x.untyped_data(), x.size_bytes(), places, places,
               record->typed_data(), row, name, blocks);
}

ffi::Future PageIn(ffi::AnyBuffer, Table places, Table written,
                   ffi::Result<ffi::AnyBuffer> x, ffi::Result<Table> record,
                   int64_t row, std::string_view name,
                   ffi::Span<const int64_t> blocks) {
  return Start(false, x->untyped_data(), x->size_bytes(), places, written,
               record->typed_data(), row, name, blocks);
}

ffi::Error Clock(ffi::RemainingArgs, ffi::Result<Pair> stamp) {
  Stamp(stamp->typed_data(), Now());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    poet_jax_page_out, PageOut,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<Table>()
        .Ret<Table>().Attr<int64_t>("row").Attr<std::string_view>("name")
        .Attr<ffi::Span<const int64_t>>("blocks"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    poet_jax_page_in, PageIn,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<Table>().Arg<Table>()
        .Ret<ffi::AnyBuffer>().Ret<Table>().Attr<int64_t>("row")
        .Attr<std::string_view>("name").Attr<ffi::Span<const int64_t>>("blocks"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    poet_jax_clock, Clock,
    ffi::Ffi::Bind().RemainingArgs().Ret<Pair>());

// Transfers on the caller's thread: writes and sets `*checksum`, or reads and verifies
// it. Returns 0, or 1 with the error in `message`.
extern "C" int poet_jax_transfer(int out, int descriptor, int flags, const char* name,
                                 void* data, int64_t size, int64_t offset,
                                 uint32_t* checksum, char* message, int64_t capacity) {
  Buffers buffers;
  bool checked = !out && !(flags & kUnknown);
  Page page{bool(out), descriptor, bool(flags & kDirect), checked,
            static_cast<char*>(data), size, offset};
  std::string error = Transfer(page, buffers, name, checksum);
  std::snprintf(message, capacity, "%s", error.c_str());
  return !error.empty();
}
