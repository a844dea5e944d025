/* Counts what torch's CPU allocator has handed out.
 *
 * That allocator asks for memory by c10::alloc_cpu and gives it back by c10::free_cpu, both called through the table of
 * imported addresses of libc10. `meter_install` puts the functions below into that table, so that nothing else is
 * counted: not what a BLAS library or Python allocates. Works on Linux, x86_64 and aarch64.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#error "unknown machine"
#endif

typedef void *(*alloc_function)(size_t);
typedef void (*free_function)(void *);

static alloc_function real_alloc;
static free_function real_free;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Addresses and sizes, by open addressing; a size of 0 marks a place that was in use. */
static struct { void *address; int64_t size; } *table;
static size_t places, taken;
static int64_t current, peak;

static size_t place_of(void *address) {
    size_t place = ((uintptr_t)address >> 6) * 0x9E3779B97F4A7C15ull % places;
    while (table[place].address && table[place].address != address) place = (place + 1) % places;
    return place;
}

static void put(void *address, int64_t size) {
    size_t place = place_of(address);
    taken += table[place].address == NULL;
    table[place].address = address;
    table[place].size = size;
}

static void grow(void) {
    size_t count = places;
    __typeof__(table) old = table;
    places = places ? 2 * places : 1 << 16;
    table = calloc(places, sizeof *table);
    taken = 0;
    for (size_t i = 0; i < count; i++) if (old[i].size) put(old[i].address, old[i].size);
    free(old);
}

static void *counted_alloc(size_t size) {
    void *address = real_alloc(size);
    if (address && size) {
        pthread_mutex_lock(&lock);
        if (2 * taken >= places) grow();
        put(address, (int64_t)size);
        current += (int64_t)size;
        if (current > peak) peak = current;
        pthread_mutex_unlock(&lock);
    }
    return address;
}

static void counted_free(void *address) {
    if (address && places) {
        pthread_mutex_lock(&lock);
        size_t place = place_of(address);
        current -= table[place].size;
        table[place].size = 0;
        pthread_mutex_unlock(&lock);
    }
    real_free(address);
}

static int changed;

static void change_slots(const struct dl_phdr_info *info, const ElfW(Rela) *first, size_t bytes,
                         const ElfW(Sym) *symbols, const char *names) {
    for (const ElfW(Rela) *item = first; (const char *)item < (const char *)first + bytes; item++) {
        if (!IS_SLOT(ELF64_R_TYPE(item->r_info))) continue;
        const char *name = names + symbols[ELF64_R_SYM(item->r_info)].st_name;
        void *replacement = !strcmp(name, "_ZN3c109alloc_cpuEm") ? (void *)counted_alloc
                            : !strcmp(name, "_ZN3c108free_cpuEPv") ? (void *)counted_free : NULL;
        if (!replacement) continue;
        void **slot = (void **)(info->dlpi_addr + item->r_offset);
        uintptr_t page = (uintptr_t)slot & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
        size_t length = (uintptr_t)(slot + 1) - page;
        /* Tables that are read-only once a library is loaded are left writable. */
        if (mprotect((void *)page, length, PROT_READ | PROT_WRITE)) continue;
        *slot = replacement;
        changed |= replacement == (void *)counted_alloc ? 1 : 2;
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *unused) {
    const char *file = strrchr(info->dlpi_name, '/');
    /* Its allocator lives here; kernels of other libraries that call alloc_cpu themselves go past it. */
    if (!file || strcmp(file, "/libc10.so")) return 0;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Rela) *calls = NULL, *others = NULL;
    size_t calls_bytes = 0, others_bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        const ElfW(Dyn) *entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) {
            if (entry->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
            if (entry->d_tag == DT_STRTAB) names = (const char *)entry->d_un.d_ptr;
            if (entry->d_tag == DT_JMPREL) calls = (const ElfW(Rela) *)entry->d_un.d_ptr;
            if (entry->d_tag == DT_PLTRELSZ) calls_bytes = entry->d_un.d_val;
            if (entry->d_tag == DT_RELA) others = (const ElfW(Rela) *)entry->d_un.d_ptr;
            if (entry->d_tag == DT_RELASZ) others_bytes = entry->d_un.d_val;
        }
    }
    if (symbols && names && calls) change_slots(info, calls, calls_bytes, symbols, names);
    if (symbols && names && others) change_slots(info, others, others_bytes, symbols, names);
    return 0;
}

/* Takes the addresses of both functions; whether calls of both are counted from now on. */
int meter_install(void *alloc, void *release) {
    real_alloc = (alloc_function)alloc;
    real_free = (free_function)release;
    pthread_mutex_lock(&lock);
    if (!places) grow();
    pthread_mutex_unlock(&lock);
    dl_iterate_phdr(visit, NULL);
    return changed == 3;
}

int64_t meter_current(void) { return current; }
int64_t meter_peak(void) { return peak; }
void meter_reset(void) { pthread_mutex_lock(&lock); peak = current; pthread_mutex_unlock(&lock); }
