// Threads that share a call's work: the caller hands out parts, helpers take some.
//
// The helpers are PyTorch's own threads, which wait for work busily: others would find the processors taken.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

// OpenMP's entry in the library that PyTorch has loaded; null where that is of another kind
#if defined(__linux__)
extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned threads, unsigned flags) __attribute__((weak));
#else
void (*const GOMP_parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
#endif

namespace {

#if defined(__x86_64__)
inline void pause() { __builtin_ia32_pause(); }
#else
inline void pause() {}
#endif

const pid_t process = getpid();  // a fork has no helpers
std::atomic<bool> working{false};

class Team {
  public:
    explicit Team(int threads) : threads(threads) {}

    // Calls `body(team)` with `threads` threads to share its parts, itself among them; alone beside another such call.
    template <class Body> static void call(int threads, const Body &body) {
        const bool alone = threads < 2 || getpid() != process || working.exchange(true);
        Team team(alone ? 1 : threads);
        if (alone) return body(team);
        struct Call {
            Team &team;
            const Body &body;
            const std::thread::id caller;
        } call{team, body, std::this_thread::get_id()};
        const auto take = [](void *own) {
            Call &call = *(Call *)own;
            if (std::this_thread::get_id() != call.caller) return call.team.help();
            call.body(call.team);
            call.team.ended = true;
        };
        GOMP_parallel ? GOMP_parallel(take, &call, threads, 0) : on_own_threads(take, &call, threads - 1);
        working = false;
    }

    // Calls `body(first, last)` for all of 0 … count in parts of about `part`.
    template <class Body> void share(int64_t count, int64_t part, const Body &body) {
        const int64_t parts = (count + part - 1) / part;
        if (threads == 1 || parts < 2 || parts >= 1 << 24) return body(0, count);
        auto call = [&](int64_t at) { body(at * part, std::min(count, (at + 1) * part)); };
        task = [](void *own, int64_t at) { (*(decltype(call) *)own)(at); };
        context = &call, finished = 0;
        ticket = ((ticket.load() >> 48) + 1) << 48 | (uint64_t)parts << 24;
        while (take()) {}
        for (int turns = 0; finished.load(std::memory_order_acquire) < parts; ++turns)
            turns < 2000 ? pause() : std::this_thread::yield();
    }

    // Small enough that the others take over what a thread that comes late leaves.
    int64_t part_of(int64_t count) const { return threads == 1 ? count : count / (8 * threads) + 1; }

    const int threads;

  private:
    static void on_own_threads(void (*take)(void *), void *context, int count) {
        std::vector<std::thread> others;
        try {
            while (count-- > 0) others.emplace_back(take, context);
        } catch (const std::system_error &) {}  // no more threads here: the caller does the rest
        take(context);
        for (std::thread &other : others) other.join();
    }

    std::atomic<bool> ended{false};
    std::atomic<uint64_t> ticket{0};  // number of the work (16 bits), its parts (24), the next part (24)
    std::atomic<int64_t> finished{0};
    void (*task)(void *, int64_t) = nullptr;
    void *context = nullptr;

    bool take() {
        uint64_t now = ticket.load();
        while ((now & 0xffffff) < (now >> 24 & 0xffffff))
            if (ticket.compare_exchange_weak(now, now + 1)) {
                task(context, now & 0xffffff);
                finished.fetch_add(1, std::memory_order_release);
                return true;
            }
        return false;
    }

    void help() {
        for (int turns = 0; !ended; ++turns) {
            if (take()) turns = 0;
            else turns < 500 ? pause() : std::this_thread::yield();  // the caller may need this processor
        }
    }
};

}  // namespace
