// Threads: the caller hands out parts of a work, helpers take some. It never waits for a helper that has not begun.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

#if defined(__x86_64__)
inline void pause() { __builtin_ia32_pause(); }
#else
inline void pause() {}
#endif

class Pool {
  public:
    const pid_t process = getpid();  // a fork has no helpers
    std::mutex busy;

    void run(int64_t parts, int threads, void (*task)(void *, int64_t), void *context) {
        try {
            for (; helpers < threads - 1; ++helpers) std::thread(&Pool::help, this, helpers).detach();
        } catch (const std::system_error &) {}  // no more threads here: the caller does the rest
        allowed = threads - 1, this->task = task, this->context = context, finished = 0;
        uint64_t number = (ticket.load() >> 48) + 1;
        ticket = number << 48 | (uint64_t)parts << 24;
        if (asleep > 0) {
            std::lock_guard<std::mutex> lock(mutex);
            condition.notify_all();
        }
        while (take()) {}
        for (int turns = 0; finished.load(std::memory_order_acquire) < parts; ++turns)
            turns < 2000 ? pause() : std::this_thread::yield();
    }

  private:
    std::atomic<uint64_t> ticket{0};  // number of the work (16 bits), its parts (24), the next part (24)
    std::atomic<int64_t> finished{0};
    std::atomic<int> asleep{0}, allowed{0};
    int helpers = 0;
    void (*task)(void *, int64_t) = nullptr;
    void *context = nullptr;
    std::mutex mutex;
    std::condition_variable condition;

    static bool open(uint64_t ticket) { return (ticket & 0xffffff) < (ticket >> 24 & 0xffffff); }

    bool take() {
        uint64_t now = ticket.load();
        while (open(now))
            if (ticket.compare_exchange_weak(now, now + 1)) {
                task(context, now & 0xffffff);
                finished.fetch_add(1, std::memory_order_release);
                return true;
            }
        return false;
    }

    void help(int number) {
        for (int turns = 0;;) {
            if (number < allowed && take()) {
                turns = 0;
            } else if (++turns < 4000) {  // about 0.2 ms: longer than between the parts of a step
                pause();
            } else {
                std::unique_lock<std::mutex> lock(mutex);
                ++asleep;
                condition.wait(lock, [&] { return number < allowed && open(ticket.load()); });
                --asleep, turns = 0;
            }
        }
    }
};

// The threads of this process. No part of `parallel`, which each kind of body would have of its own: their helpers
// would take each other's processors.
Pool &pool() {
    static std::atomic<Pool *> shared{nullptr};  // never deleted: helpers may outlive main
    Pool *pool = shared;
    if (!pool || pool->process != getpid()) {
        Pool *own = new Pool;
        if (shared.compare_exchange_strong(pool, own)) pool = own;
        else delete own;  // another thread was first
    }
    return *pool;
}

// Calls `body(first, last)` for all of 0 … count in parts of about `part`.
template <class Body> void parallel(int threads, int64_t count, int64_t part, const Body &body) {
    int64_t parts = (count + part - 1) / part;
    if (threads > 1 && parts > 1 && parts < 1 << 24) {
        Pool &shared = pool();
        if (std::unique_lock<std::mutex> alone(shared.busy, std::try_to_lock); alone) {
            auto call = [&](int64_t at) { body(at * part, std::min(count, (at + 1) * part)); };
            shared.run(parts, threads, [](void *own, int64_t at) { (*(decltype(call) *)own)(at); }, &call);
            return;
        }
    }
    body(0, count);
}

}  // namespace
