// What a step does to numbers, each in one pass over memory: the codecs int8 and small, sums of squares, products
// modulo a prime, gradients onto a grid, and AdamW.
//
// The reference is in torch, in wire/codec_blocks.py, codec_casts.py, codec_planes.py, and in stage/same_bits.py,
// rounding.py, accumulator.py and optimizer.py, and in
// sums/linear.py. Every result here has its bits: one IEEE operation after the other, compiled without contraction into fused multiply-adds. Plain C
// functions without state, for ctypes; `threads` more than one are started and joined within the call.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

using i64 = std::int64_t;
using u64 = std::uint64_t;
using u8 = std::uint8_t;

namespace {

enum Status : i64 { FINE = 0, REFUSED = 1, OVERFLOWN = 2 };
enum Mode : i64 { WRITE = 0, ADD = 1, SUBTRACT = 2 };

// Call work(first, last, number) for [0, count) cut into at most `threads` ranges.
template <class Work> void in_ranges(i64 count, i64 threads, Work work) {
    const i64 ranges = std::max<i64>(1, std::min(threads, count));
    std::vector<std::thread> started;
    for (i64 number = 1; number < ranges; number++) {
        const i64 first = count * number / ranges, last = count * (number + 1) / ranges;
        try {
            started.emplace_back(work, first, last, number);
        } catch (const std::system_error&) {  // the system has no more threads
            work(first, last, number);
        }
    }
    work(0, count / ranges, 0);
    for (auto& thread : started) thread.join();
}

// ---------------------------------------------------------------- int8

constexpr i64 INT8_BLOCK = 256;
constexpr float TINY = 0x1p-110f, UNIT = static_cast<float>(1.0 / 16129.0);

// False if an element is not finite. The reference divides by a reciprocal, as torch does.
bool int8_encode_block(const float* x, i64 n, float* scale, std::int8_t* codes) {
    std::uint32_t largest = 0;
    for (i64 k = 0; k < n; k++) {
        std::uint32_t bits;
        std::memcpy(&bits, x + k, 4);
        largest = std::max(largest, bits & 0x7fffffffu);
    }
    if (largest >= 0x7f800000u) return false;
    std::memcpy(scale, &largest, 4);
    if (!(*scale > TINY)) *scale = 0.0f;
    const float stretch = (1.0f / (*scale == 0.0f ? 1.0f : *scale)) * 16129.0f;
    for (i64 k = 0; k < n; k++) {
        const float code = std::copysign(std::nearbyint(std::sqrt(std::fabs(x[k]) * stretch)), x[k]);
        codes[k] = static_cast<std::int8_t>(static_cast<std::int32_t>(code));
    }
    return true;
}

void int8_decode_block(float scale, const std::int8_t* codes, i64 n, float* out) {
    for (i64 k = 0; k < n; k++) {
        const float code = static_cast<float>(codes[k]);
        out[k] = code * std::fabs(code) * UNIT * scale;
    }
}

// ---------------------------------------------------------------- small

constexpr i64 BLOCK = 64, MOST_SPARSE = 3, SPARSE_BELOW = 6;
constexpr i64 MOST_BYTES = 1 + MOST_SPARSE + 8 * MOST_SPARSE + 8 * BLOCK;  // of a block, and more than it writes

// Memory of this thread for so many encoded blocks. It is kept: fresh memory would be cleared by the system.
u8* small_scratch(i64 blocks) {
    thread_local std::unique_ptr<u8[]> held;
    thread_local i64 size = 0;
    if (blocks > size) held.reset(new u8[(size = blocks) * MOST_BYTES]);
    return held.get();
}

// to_planes: word p of 8 gets bit p of each of 64 bytes, that of byte k at bit k. from_planes: back.
// gathered: to `to` the bytes of a word that `mask` names; where the next one goes. Writes up to 8. scattered: back.
#if defined(__AVX512BW__) && defined(__BMI2__)

inline __m512i bit(int p) { return _mm512_set1_epi8(static_cast<char>(1 << p)); }

inline void to_planes(const u8* octets, u64* planes) {
    const __m512i all = _mm512_loadu_si512(octets);
    for (int p = 0; p < 8; p++) planes[p] = _mm512_test_epi8_mask(all, bit(p));
}

inline void from_planes(const u64* planes, u8* octets) {
    __m512i all = _mm512_setzero_si512();
    for (int p = 0; p < 8; p++) all = _mm512_mask_add_epi8(all, planes[p], all, bit(p));
    _mm512_storeu_si512(octets, all);
}

inline u64 bytes_of(u8 mask) { return _pdep_u64(mask, 0x0101010101010101u) * 0xFF; }

inline u8* gathered(u64 word, u8 mask, u8* to) {
    const u64 kept = _pext_u64(word, bytes_of(mask));
    std::memcpy(to, &kept, sizeof kept);
    return to + __builtin_popcount(mask);
}

inline u64 scattered(u8 mask, const u8*& from, const u8* end) {
    u64 kept = 0;
    if (end - from >= 8) std::memcpy(&kept, from, 8);
    else std::memcpy(&kept, from, end - from);
    from += __builtin_popcount(mask);
    return _pdep_u64(kept, bytes_of(mask));
}

#else
#if defined(__AVX2__)

inline void to_planes(const u8* octets, u64* planes) {
    std::fill(planes, planes + 8, 0);
    for (int half = 0; half < BLOCK; half += 32) {
        const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(octets + half));
        for (int p = 0; p < 8; p++)  // a byte's highest bit counts
            planes[p] |= u64{static_cast<unsigned>(_mm256_movemask_epi8(_mm256_slli_epi16(some, 7 - p)))} << half;
    }
}

inline void from_planes(const u64* planes, u8* octets) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x(static_cast<i64>(0x8040201008040201u));
    for (int half = 0; half < BLOCK; half += 32) {
        __m256i all = _mm256_setzero_si256();
        for (int p = 7; p >= 0; p--) {  // the highest first: what is there moves up by one
            const __m256i word = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(planes[p] >> half)), byte_of);
            const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(word, bit_of), bit_of);  // -1 where it is
            all = _mm256_sub_epi8(_mm256_add_epi8(all, all), set);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(octets + half), all);
    }
}

#else

// Each word seen as 8 bytes of 8 bits, turned about its diagonal (Hacker's Delight, 7-3).
inline void flip(u64* words) {
    for (int k = 0; k < 8; k++) {
        u64 word = words[k], moved;
        moved = (word ^ word >> 7) & 0x00AA00AA00AA00AAu, word ^= moved ^ moved << 7;
        moved = (word ^ word >> 14) & 0x0000CCCC0000CCCCu, word ^= moved ^ moved << 14;
        moved = (word ^ word >> 28) & 0x00000000F0F0F0F0u, word ^= moved ^ moved << 28;
        words[k] = word;
    }
}

// 8 words of 8 bytes, turned about their diagonal.
template <int distance> inline void turn_step(u64* words, u64 mask) {
    for (int k = 0; k < 8; k++) {
        if (k & distance) continue;
        const u64 moved = (words[k] >> 8 * distance ^ words[k + distance]) & mask;
        words[k] ^= moved << 8 * distance;
        words[k + distance] ^= moved;
    }
}

inline void turn(u64* words) {
    turn_step<4>(words, 0x00000000FFFFFFFFu);
    turn_step<2>(words, 0x0000FFFF0000FFFFu);
    turn_step<1>(words, 0x00FF00FF00FF00FFu);
}

inline void to_planes(const u8* octets, u64* planes) {
    std::memcpy(planes, octets, BLOCK);
    flip(planes);
    turn(planes);
}

inline void from_planes(const u64* planes, u8* octets) {
    u64 words[8];
    std::memcpy(words, planes, BLOCK);
    turn(words);
    flip(words);
    std::memcpy(octets, words, BLOCK);
}

#endif

inline u8* gathered(u64 word, u8 mask, u8* to) {
    for (unsigned left = mask; left; left &= left - 1) *to++ = static_cast<u8>(word >> 8 * __builtin_ctz(left));
    return to;
}

inline u64 scattered(u8 mask, const u8*& from, const u8*) {
    u64 word = 0;
    for (unsigned left = mask; left; left &= left - 1) word |= static_cast<u64>(*from++) << 8 * __builtin_ctz(left);
    return word;
}

#endif

// Which of a word's bytes are not zero.
inline u8 mask_of(u64 word) {
    const u64 some = ((word & 0x7F7F7F7F7F7F7F7Fu) + 0x7F7F7F7F7F7F7F7Fu | word) >> 7 & 0x0101010101010101u;
    return static_cast<u8>(some * 0x0102040810204080u >> 56);
}

// The four parts of the layout as they grow: where the next byte goes, or comes from.
template <class Byte> struct Parts {
    Byte *head, *masks, *octets, *dense;
};

void small_encode_block(const i64* x, i64 n, Parts<u8>& to) {
    u64 zigzag[BLOCK] = {}, used = 0, planes[BLOCK];
    for (i64 k = 0; k < n; k++) {
        zigzag[k] = static_cast<u64>(x[k]) << 1 ^ static_cast<u64>(x[k] >> 63);
        used |= zigzag[k];
    }
    int width = used ? 64 - __builtin_clzll(used) : 0;
    if (width > 62) width = 64;
    for (int low = 0; low < width; low += 8) {
        u8 octets[BLOCK];
        for (i64 k = 0; k < BLOCK; k++) octets[k] = static_cast<u8>(zigzag[k] >> low);
        to_planes(octets, planes + low);
    }
    // Planes are sparse from the highest one down, as long as that makes them shorter.
    u8 masks[MOST_SPARSE];
    int sparse = 0;
    while (sparse < MOST_SPARSE && sparse < width) {
        masks[sparse] = mask_of(planes[width - 1 - sparse]);
        if (__builtin_popcount(masks[sparse]) >= SPARSE_BELOW) break;
        sparse++;
    }
    *to.head++ = static_cast<u8>(std::min(width, 63) + 64 * sparse);
    for (int rank = sparse - 1; rank >= 0; rank--) {
        *to.masks++ = masks[rank];
        to.octets = gathered(planes[width - 1 - rank], masks[rank], to.octets);
    }
    std::memcpy(to.dense, planes, 8 * (width - sparse));
    to.dense += 8 * (width - sparse);
}

// What was decoded, over all blocks: the extremes, of which the larger magnitude is exact, and whether a sum has left
// int64.
struct Seen {
    i64 low = INT64_MAX, high = INT64_MIN;
    bool overflown = false;
    u8 octets[BLOCK] = {};  // by place in a block, as vectors compare: the largest zigzag of narrow blocks

    void add(i64 number) { low = std::min(low, number), high = std::max(high, number); }
};

template <class Number> inline void put(const Number* numbers, i64 n, i64* out, i64 mode, Seen& seen) {
    if (mode == WRITE) {
        for (i64 k = 0; k < n; k++) out[k] = numbers[k];
        return;
    }
    u64 over = 0;
    for (i64 k = 0; k < n; k++) {
        const u64 before = static_cast<u64>(out[k]), number = static_cast<u64>(static_cast<i64>(numbers[k]));
        const u64 after = mode == ADD ? before + number : before - number;
        over |= (before ^ after) & (number ^ after);
        out[k] = static_cast<i64>(after);
    }
    seen.overflown |= mode == ADD && over >> 63;
}

template <class Number> void see(const Number* numbers, i64 n, Seen& seen) {
    Number low = numbers[0], high = numbers[0];
    for (i64 k = 1; k < n; k++) low = std::min(low, numbers[k]), high = std::max(high, numbers[k]);
    seen.add(low), seen.add(high);
}

template <class Unsigned, class Signed>
void small_put(const u64* planes, int width, i64 n, i64* out, i64 mode, Seen& seen) {
    Unsigned zigzag[BLOCK] = {};
    u8 octets[BLOCK];
    for (int low = 0; low < width; low += 8) {
        from_planes(planes + low, octets);
        for (i64 k = 0; k < BLOCK; k++) zigzag[k] |= static_cast<Unsigned>(octets[k]) << low;
    }
    Signed numbers[BLOCK];
    for (i64 k = 0; k < BLOCK; k++) numbers[k] = static_cast<Signed>(zigzag[k] >> 1 ^ -(zigzag[k] & 1));
    see(numbers, n, seen);
    put(numbers, n, out, mode, seen);
}

void small_decode_block(Parts<const u8>& from, const u8* end, i64 n, i64* out, i64 mode, Seen& seen) {
    const int head = *from.head++, sparse = head >> 6, width = (head & 63) == 63 ? 64 : head & 63;
    u64 planes[BLOCK] = {};
    std::memcpy(planes, from.dense, 8 * (width - sparse));
    from.dense += 8 * (width - sparse);
    for (int plane = width - sparse; plane < width; plane++)
        planes[plane] = scattered(*from.masks++, from.octets, end);
    if (width > 32) return small_put<u64, i64>(planes, width, n, out, mode, seen);
    if (width > 16) return small_put<std::uint32_t, std::int32_t>(planes, width, n, out, mode, seen);
    if (width > 8) return small_put<std::uint16_t, std::int16_t>(planes, width, n, out, mode, seen);
    u8 octets[BLOCK];
    from_planes(planes, octets);
    std::int8_t numbers[BLOCK];
    for (i64 k = n; k < BLOCK; k++) octets[k] = 0;
    for (i64 k = 0; k < BLOCK; k++) numbers[k] = static_cast<std::int8_t>(octets[k] >> 1 ^ -(octets[k] & 1));
    for (i64 k = 0; k < BLOCK; k++) seen.octets[k] = std::max(seen.octets[k], octets[k]);
    // Loops of a fixed length have no remainders.
    if (n == BLOCK) put(numbers, BLOCK, out, mode, seen);
    else put(numbers, n, out, mode, seen);
}

// ---------------------------------------------------------------- sums of squares

// Of numbers times `unit`. The second half is added to the first, until one is left.
template <class Number> double squares(const Number* x, i64 n, double unit) {
    thread_local std::vector<double> terms;
    if (n < 1) return 0.0;
    const i64 quarter = n / 4;
    i64 half = (n + 1) / 2;
    terms.resize(std::max<i64>(half, terms.size()));
    double* const term = terms.data();
    const auto square = [&](i64 k) { return (static_cast<double>(x[k]) * unit) * (static_cast<double>(x[k]) * unit); };
    if (4 * quarter == n) {  // twice at once
        for (i64 k = 0; k < quarter; k++)
            term[k] = square(k) + square(k + half) + (square(k + quarter) + square(k + half + quarter));
        half = quarter;
    } else {
        for (i64 k = 0; k < half; k++) term[k] = square(k);
        for (i64 k = half; k < n; k++) term[k - half] += square(k);
    }
    for (i64 left = half; left > 1; left = half) {
        half = (left + 1) / 2;
        for (i64 k = half; k < left; k++) term[k - half] += term[k];
    }
    return term[0];
}

// ---------------------------------------------------------------- the small grid

template <class Sum>
void small_add_run(const float* x, i64 n, float by_row, const float* by_column, const float* dither, float limit,
                   Sum* total) {
    for (i64 k = 0; k < n; k++) {
        const float steps = std::floor(x[k] * by_row * by_column[k] + dither[k]);
        total[k] += static_cast<std::int32_t>(std::min(std::max(steps, -limit), limit));
    }
}

template <class Sum>
void small_add_to(const float* x, i64 rows, i64 columns, const float* by_row, const float* by_column,
                  const float* dither, i64 at, i64 apart, float limit, Sum* total, i64 threads) {
    constexpr i64 PERIOD = 1 << 16;
    in_ranges(rows, threads, [&](i64 first, i64 last, i64) {
        for (i64 row = first; row < last; row++) {
            const float scale = by_row[row];
            const float* const u = dither + (at + row * apart) % PERIOD;
            for (i64 start = 0; start < columns; start += PERIOD) {
                const float *from = x + row * columns + start, *scales = by_column + start;
                small_add_run(from, std::min(PERIOD, columns - start), scale, scales, u, limit,
                              total + row * columns + start);
            }
        }
    });
}

i64 ended(const std::vector<Seen>& ranges, i64* extremes) {
    Seen all;
    for (const Seen& each : ranges) {
        all.low = std::min(all.low, each.low), all.high = std::max(all.high, each.high);
        for (const u8 octet : each.octets) all.add(octet >> 1 ^ -(octet & 1));
        all.overflown |= each.overflown;
    }
    extremes[0] = all.low, extremes[1] = all.high;
    return all.overflown ? OVERFLOWN : FINE;
}

// ---------------------------------------------------------------- products modulo a prime

using u128 = unsigned __int128;
using i128 = __int128;

constexpr u64 PRIME = (u64{1} << 61) - 1;
constexpr i64 WIDTH = 1024, PIECE_BITS = 30, LIMB_BITS = 21;

inline u64 once(u64 value) { return value >= PRIME ? value - PRIME : value; }

inline u64 residue(i128 value) {
    const u128 size = value < 0 ? -static_cast<u128>(value) : static_cast<u128>(value);
    const u64 sum = static_cast<u64>(size & PRIME) + static_cast<u64>(size >> 61 & PRIME) + static_cast<u64>(size >> 122);
    const u64 found = once(once((sum & PRIME) + (sum >> 61)));
    return value < 0 && found ? PRIME - found : found;
}

// WIDTH residues in limbs of 21 bits: multiplied by a number of 32 bits, WIDTH of them add up to less than 2^63.
struct Limbs {
    std::int32_t low[WIDTH], middle[WIDTH], high[WIDTH];

    explicit Limbs(const i64* residues) {
        constexpr i64 mask = (1 << LIMB_BITS) - 1;
        for (i64 k = 0; k < WIDTH; k++) {
            low[k] = residues[k] & mask, middle[k] = residues[k] >> LIMB_BITS & mask;
            high[k] = residues[k] >> 2 * LIMB_BITS;
        }
    }
};

// Of n numbers and the residues from `first` on. Numbers of more than 32 bits are taken in pieces, the lowest first:
// vectors multiply 32 bits by 32 at once.
u64 weighed(const i64* x, const Limbs& by, i64 first, i64 n) {
    u64 used = 0, total = 0;
    for (i64 k = 0; k < n; k++) used |= static_cast<u64>(x[k] ^ x[k] >> 63);
    const std::int32_t *const by_low = by.low + first, *const by_middle = by.middle + first, *const by_high = by.high + first;
    for (i64 shift = 0;; shift += PIECE_BITS) {
        const bool last = !(used >> shift >> 31);
        const i64 mask = last ? -1 : (i64{1} << PIECE_BITS) - 1;
        i64 low = 0, middle = 0, high = 0;
        for (i64 k = 0; k < n; k++) {
            const i64 piece = static_cast<std::int32_t>(x[k] >> shift & mask);
            low += piece * by_low[k], middle += piece * by_middle[k], high += piece * by_high[k];
        }
        const i128 sum = low + (static_cast<i128>(middle) << LIMB_BITS) + (static_cast<i128>(high) << 2 * LIMB_BITS);
        total = once(total + residue(static_cast<i128>(residue(sum)) << shift));
        if (last) return total;
    }
}

}  // namespace

extern "C" {

// x [n] to scales [blocks] and codes [n]. REFUSED: an element is not finite.
i64 int8_encode(const float* x, i64 n, float* scales, std::int8_t* codes, i64 threads) {
    std::atomic<bool> finite{true};
    in_ranges((n + INT8_BLOCK - 1) / INT8_BLOCK, threads, [&](i64 first, i64 last, i64) {
        for (i64 block = first; block < last && finite; block++) {
            const i64 start = block * INT8_BLOCK;
            if (!int8_encode_block(x + start, std::min(INT8_BLOCK, n - start), scales + block, codes + start))
                finite = false;
        }
    });
    return finite ? FINE : REFUSED;
}

// Over out [n]. REFUSED, and nothing written: bytes that no encoder writes.
i64 int8_decode(const float* scales, const std::int8_t* codes, i64 n, float* out, i64 threads) {
    const i64 blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    for (i64 block = 0; block < blocks; block++)
        if (!(scales[block] >= 0.0f && scales[block] <= 0x1.fffffep127f)) return REFUSED;
    u8 wrong = 0;
    for (i64 k = 0; k < n; k++) wrong |= codes[k] == -128;
    if (wrong) return REFUSED;
    in_ranges(blocks, threads, [&](i64 first, i64 last, i64) {
        for (i64 block = first; block < last; block++) {
            const i64 start = block * INT8_BLOCK;
            int8_decode_block(scales[block], codes + start, std::min(INT8_BLOCK, n - start), out + start);
        }
    });
    return FINE;
}

// x [n] to the parts of the layout in this thread's scratch, and where they end: ends [4 threads]. Returns the bytes of
// all.
i64 small_encode(const i64* x, i64 n, i64* ends, i64 threads) {
    const i64 blocks = (n + BLOCK - 1) / BLOCK;
    u8* const scratch = small_scratch(blocks);
    std::fill(ends, ends + 4 * threads, 0);
    in_ranges(blocks, threads, [&](i64 first, i64 last, i64 number) {
        const i64 count = last - first;
        u8* const place = scratch + first * MOST_BYTES;
        const Parts<u8> begin{
            place, place + count, place + count * (1 + MOST_SPARSE), place + count * (1 + 9 * MOST_SPARSE)};
        Parts<u8> to = begin;
        for (i64 block = first; block < last; block++)
            small_encode_block(x + block * BLOCK, std::min(BLOCK, n - block * BLOCK), to);
        i64* const mine = ends + 4 * number;
        mine[0] = to.head - begin.head, mine[1] = to.masks - begin.masks;
        mine[2] = to.octets - begin.octets, mine[3] = to.dense - begin.dense;
    });
    i64 whole = 0;
    for (i64 k = 0; k < 4 * threads; k++) whole += ends[k];
    return whole;
}

// What small_encode has left in this thread's scratch, part after part, to `out`.
void small_join(const i64* ends, u8* out, i64 threads) {
    const i64 begins[4] = {0, 1, 1 + MOST_SPARSE, 1 + 9 * MOST_SPARSE};
    for (int part = 0; part < 4; part++) {
        const u8* place = small_scratch(0);
        for (const i64* of = ends; of < ends + 4 * threads; of += 4) {
            std::memcpy(out, place + begins[part] * of[0], of[part]);
            out += of[part];
            place += of[0] * MOST_BYTES;  // of[0]: its blocks
        }
    }
}

// Over out [n], or added to it. extremes [2]: of what was decoded. REFUSED: no such layout. OVERFLOWN, and out as it
// was: a sum would leave int64.
i64 small_decode(const u8* data, i64 num_bytes, i64 n, i64* out, i64 mode, i64* extremes, i64 threads) {
    const i64 blocks = (n + BLOCK - 1) / BLOCK;
    if (num_bytes < blocks) return REFUSED;
    i64 num_masks = 0, num_octets = 0, num_dense = 0;
    for (i64 block = 0; block < blocks; block++) {
        const int sparse = data[block] >> 6, width = (data[block] & 63) == 63 ? 64 : data[block] & 63;
        if (sparse > width) return REFUSED;
        num_masks += sparse, num_dense += width - sparse;
    }
    const u8* const masks = data + blocks;
    if (num_bytes < blocks + num_masks) return REFUSED;
    for (i64 k = 0; k < num_masks; k++) num_octets += __builtin_popcount(masks[k]);
    if (num_bytes != blocks + num_masks + num_octets + 8 * num_dense) return REFUSED;
    // Where each range begins follows from the blocks before it.
    const i64 ranges = std::max<i64>(1, std::min(threads, blocks));
    std::vector<Parts<const u8>> begins;
    Parts<const u8> at{data, masks, masks + num_masks, masks + num_masks + num_octets};
    for (i64 number = 0, block = 0; number < ranges; number++) {
        for (; ranges > 1 && block < blocks * number / ranges; block++) {
            const int sparse = *at.head >> 6, width = (*at.head & 63) == 63 ? 64 : *at.head & 63;
            for (int k = 0; k < sparse; k++) at.octets += __builtin_popcount(*at.masks++);
            at.dense += 8 * (width - sparse), at.head++;
        }
        begins.push_back(at);
    }
    std::vector<Seen> seen(ranges);
    in_ranges(blocks, ranges, [&](i64 first, i64 last, i64 number) {
        Parts<const u8> from = begins[number];
        for (i64 block = first; block < last; block++)
            small_decode_block(
                from, data + num_bytes, std::min(BLOCK, n - block * BLOCK), out + block * BLOCK, mode, seen[number]);
    });
    const i64 status = ended(seen, extremes);
    if (status == OVERFLOWN) {
        i64 ignored[2];
        small_decode(data, num_bytes, n, out, SUBTRACT, ignored, threads);  // integers come back exactly
    }
    return status;
}

double squares_of_floats(const float* x, i64 n, double unit) { return squares(x, n, unit); }

double squares_of_doubles(const double* x, i64 n, double unit) { return squares(x, n, unit); }

double squares_of_integers(const i64* x, i64 n, double unit) { return squares(x, n, unit); }

// x [n] to out [n]. REFUSED, and some of it written: a number does not fit.
i64 shorten(const i64* x, i64 n, std::int16_t* out) {
    constexpr i64 PIECE = 1 << 12;
    for (i64 start = 0; start < n; start += PIECE) {
        u64 shifted = 0;
        for (i64 k = start; k < std::min(start + PIECE, n); k++) {
            shifted |= static_cast<u64>(x[k]) + (u64{1} << 15);
            out[k] = static_cast<std::int16_t>(x[k]);
        }
        if (shifted >> 16) return REFUSED;
    }
    return FINE;
}

// ---------------------------------------------------------------- gradients onto a grid

// The bits of the largest magnitude in x [n]; those of NaN are above infinity's.
std::uint32_t largest(const float* x, i64 n) {
    std::uint32_t found = 0;
    for (i64 k = 0; k < n; k++) {
        std::uint32_t bits;
        std::memcpy(&bits, x + k, 4);
        found = std::max(found, bits & 0x7fffffffu);
    }
    return found;
}

// Add x [n] in units of 1 / per_unit, a power of two, to total.
void fine_add(const float* x, i64 n, float per_unit, i64* total, i64 threads) {
    in_ranges(n, threads, [&](i64 first, i64 last, i64) {
        for (i64 k = first; k < last; k++) total[k] += static_cast<i64>(std::nearbyint(x[k] * per_unit));
    });
}

// Add x [rows, columns] on the small grid to total. Row r begins at entry at + r * apart of `dither`, which has PERIOD
// entries, twice.
void small_add(const float* x, i64 rows, i64 columns, const float* by_row, const float* by_column, const float* dither,
               i64 at, i64 apart, float limit, i64* total, i64 threads) {
    small_add_to(x, rows, columns, by_row, by_column, dither, at, apart, limit, total, threads);
}

// The same, where total fits int32.
void small_add_narrow(const float* x, i64 rows, i64 columns, const float* by_row, const float* by_column,
                      const float* dither, i64 at, i64 apart, float limit, std::int32_t* total, i64 threads) {
    small_add_to(x, rows, columns, by_row, by_column, dither, at, apart, limit, total, threads);
}

// What total [rows, columns] on the small grid stands for, times `scale`.
void small_values(const i64* total, i64 rows, i64 columns, const float* by_row, const float* by_column, float scale,
                  float* out) {
    for (i64 row = 0; row < rows; row++)
        for (i64 k = row * columns, column = 0; column < columns; k++, column++)
            out[k] = static_cast<float>(total[k]) * by_row[row] * by_column[column] * scale;
}

// Sums over rows, and over columns, which are added to, of the squares of total [rows, columns] >> shift, cut to +-most.
void squares_by(const i64* total, i64 rows, i64 columns, i64 shift, i64 most, i64* by_row, i64* by_column) {
    for (i64 row = 0; row < rows; row++) {
        i64 sum = 0;
        for (i64 k = 0; k < columns; k++) {
            const i64 number = std::min(std::max(total[row * columns + k] >> shift, -most), most);
            sum += number * number;
            by_column[k] += number * number;
        }
        by_row[row] = sum;
    }
}

// The product of x [n], which begins at `start` of a sum, with rows[i / WIDTH] * columns[i % WIDTH], modulo PRIME.
i64 linear(const i64* x, i64 n, i64 start, const i64* rows, const i64* columns, i64 threads) {
    const i64 first_row = start / WIDTH, end = start + n;
    const i64 count = n ? (end + WIDTH - 1) / WIDTH - first_row : 0;
    std::vector<u64> totals(std::max<i64>(1, std::min(threads, count)), 0);
    const Limbs limbs(columns);
    in_ranges(count, static_cast<i64>(totals.size()), [&](i64 first, i64 last, i64 number) {
        u64 total = 0;
        for (i64 row = first_row + first; row < first_row + last; row++) {
            const i64 from = std::max(start, row * WIDTH), to = std::min(end, (row + 1) * WIDTH);
            const u64 found = weighed(x + (from - start), limbs, from - row * WIDTH, to - from);
            total = once(total + residue(static_cast<i128>(found) * rows[row]));
        }
        totals[number] = total;
    });
    u64 total = 0;
    for (const u64 each : totals) total = once(total + each);
    return static_cast<i64>(total);
}

// ---------------------------------------------------------------- AdamW

// How stage/optimizer.py calls them.
struct Update {
    float first, first_kept, second, second_kept, ahead, ahead_kept, floor, rate, kept;
};

// Of n weights. ahead: 0 where nothing leads; kept: 1 where nothing decays.
void adamw(float* w, const float* g, float* m, float* v, i64 n, const Update* by, i64 threads) {
    const Update u = *by;
    in_ranges(n, threads, [&](i64 start, i64 end, i64) {
        for (i64 k = start; k < end; k++) {
            const float first = m[k] * u.first_kept + g[k] * u.first;
            const float second = v[k] * u.second_kept + g[k] * g[k] * u.second;
            const float led = u.ahead != 0.0f ? first * u.ahead_kept + g[k] * u.ahead : first;
            m[k] = first, v[k] = second;
            w[k] = w[k] * u.kept - led / (std::sqrt(second) + u.floor) * u.rate;
        }
    });
}

}  // extern "C"
