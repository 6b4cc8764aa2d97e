/* A libnvidia-ml for tests: it says what a text file says, read anew at every call.

   The file is named by FAKE_NVML; without it there is no driver. Each line is one of

       gpu GPU-1 temperature=65 power=250000 ...    a GPU and what it tells; what is not named it does not support
       event GPU-1 8 79                             an event (its type, its data), told once to each event set

   Values of a gpu: name use used total temperature power ecc reasons events, as NVML counts them. another=1 gives its
   events another handle; error=N makes every call about it fail with N; hang=1 makes every call about it last until that
   is no longer so, and a file FAKE_NVML.hangs is there from then on. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, NO_DRIVER = 9, TIMEOUT = 10 };
enum { MOST = 16, LINE = 1024, POLL_US = 2000 };

typedef struct { char uuid[80]; } Gpu;
typedef struct { Gpu *device; unsigned long long type, data; unsigned instance, compute; } Event;
typedef struct { unsigned gpu, memory; } Use;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { int told; } Set;

static Gpu handles[MOST], others[MOST]; /* a handle stays the same for ever, but a GPU may have two */

static Gpu *find_in(Gpu *handles, const char *uuid) {
    for (int i = 0; i < MOST; i++) {
        if (!handles[i].uuid[0]) snprintf(handles[i].uuid, sizeof handles[i].uuid, "%s", uuid);
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    }
    return NULL;
}

static Gpu *handle_of(const char *uuid) { return find_in(handles, uuid); }

static FILE *open_state(void) {
    const char *path = getenv("FAKE_NVML");
    return path ? fopen(path, "r") : NULL;
}

/* The index-th line that begins with this word, and a uuid if one is given; whether there is one. */
static int find_line(const char *word, const char *uuid, int index, char *line) {
    FILE *file = open_state();
    int found = 0;
    while (file && !found && fgets(line, LINE, file)) {
        char kind[16], name[80];
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%15s %79s", kind, name) == 2 && !strcmp(kind, word) && (!uuid || !strcmp(name, uuid)))
            found = index-- == 0;
    }
    if (file) fclose(file);
    return found;
}

static int text_of(const char *line, const char *key, char *into, size_t size) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, " %s=", key);
    const char *at = strstr(line, wanted);
    if (!at) return NOT_SUPPORTED;
    at += strlen(wanted);
    snprintf(into, size, "%.*s", (int)strcspn(at, " "), at);
    return OK;
}

/* A file beside the state, for a test to wait for. */
static void say_that_it_hangs(void) {
    char path[LINE];
    snprintf(path, sizeof path, "%s.hangs", getenv("FAKE_NVML"));
    FILE *file = fopen(path, "w");
    if (file) fclose(file);
}

/* What the file says of a GPU, once it no longer hangs. */
static int look_up(Gpu *gpu, char *line) {
    char text[32];
    for (;;) {
        if (!find_line("gpu", gpu->uuid, 0, line)) return NOT_FOUND;
        if (text_of(line, "hang", text, sizeof text) != OK) break;
        say_that_it_hangs();
        usleep(POLL_US);
    }
    return text_of(line, "error", text, sizeof text) == OK ? atoi(text) : OK;
}

static int value_of(Gpu *gpu, const char *key, unsigned long long *into) {
    char line[LINE], text[64];
    int error = look_up(gpu, line);
    if (!error) error = text_of(line, key, text, sizeof text);
    if (!error) *into = strtoull(text, NULL, 0);
    return error;
}

static int number_of(Gpu *gpu, const char *key, unsigned *into) {
    unsigned long long value = 0;
    int error = value_of(gpu, key, &value);
    if (!error) *into = (unsigned)value;
    return error;
}

static int known(void) {
    FILE *file = open_state();
    if (!file) return 0;
    fclose(file);
    return 1;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return known() ? OK : NO_DRIVER; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { (void)error; return "as the test wants it"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    char line[LINE];
    for (*count = 0; find_line("gpu", NULL, (int)*count, line); ++*count) {}
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    char line[LINE], uuid[80];
    if (!find_line("gpu", NULL, (int)index, line) || sscanf(line, "gpu %79s", uuid) != 1) return INVALID;
    *gpu = handle_of(uuid);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    char line[LINE];
    *gpu = handle_of(uuid);
    return *gpu ? look_up(*gpu, line) : NOT_FOUND;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned size) {
    char line[LINE];
    int error = look_up(gpu, line);
    if (!error) snprintf(uuid, size, "%s", gpu->uuid);
    return error;
}

int nvmlDeviceGetName(Gpu *gpu, char *name, unsigned size) {
    char line[LINE];
    int error = look_up(gpu, line);
    return error ? error : text_of(line, "name", name, size);
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Use *use) {
    use->memory = 0;
    return number_of(gpu, "use", &use->gpu);
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    int error = value_of(gpu, "used", &memory->used);
    if (!error) error = value_of(gpu, "total", &memory->total);
    if (!error) memory->free = memory->total - memory->used;
    return error;
}

int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *degrees) {
    return sensor == 0 ? number_of(gpu, "temperature", degrees) : INVALID;
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts) { return number_of(gpu, "power", milliwatts); }

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int type, int counter, unsigned long long *count) {
    return type == 1 && counter == 0 ? value_of(gpu, "ecc", count) : INVALID; /* uncorrected, volatile */
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *reasons) {
    return value_of(gpu, "reasons", reasons);
}

int nvmlDeviceGetSupportedEventTypes(Gpu *gpu, unsigned long long *types) { return value_of(gpu, "events", types); }

int nvmlEventSetCreate(Set **set) {
    *set = calloc(1, sizeof **set);
    return OK;
}

int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long types, Set *set) {
    (void)gpu, (void)types, (void)set;
    return OK;
}

int nvmlEventSetWait_v2(Set *set, Event *event, unsigned milliseconds) {
    char line[LINE], uuid[80];
    for (long waited = 0; waited <= milliseconds * 1000L; waited += POLL_US) {
        if (find_line("event", NULL, set->told, line)) {
            memset(event, 0, sizeof *event);
            if (sscanf(line, "event %79s %llu %llu", uuid, &event->type, &event->data) != 3) return INVALID;
            char of[LINE], text[8];
            int another = find_line("gpu", uuid, 0, of) && text_of(of, "another", text, sizeof text) == OK;
            event->device = find_in(another ? others : handles, uuid);
            set->told++;
            return OK;
        }
        usleep(POLL_US);
    }
    return TIMEOUT;
}

int nvmlEventSetFree(Set *set) {
    free(set);
    return OK;
}
