#include "trainer/run.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/json.h"

/* mkdir -p. */
static int directory_make(const char *path, Error *error)
{
    char part[4096];
    struct stat status;
    if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part) return error_set(error, "--out: the path is longer than 4095 bytes");
    for (char *at = part + 1;; at++) {
        if (*at && *at != '/') continue;
        char kept = *at;
        *at = 0;
        if (mkdir(part, 0777) && errno != EEXIST) return error_set(error, "--out %s: %s cannot be made: %s", path, part, strerror(errno));
        *at = kept;
        if (!kept) break;
    }
    if (stat(path, &status)) return error_set(error, "--out %s: %s", path, strerror(errno));
    if (!S_ISDIR(status.st_mode)) return error_set(error, "--out %s is not a directory", path);
    return 0;
}

/* Does dir hold what a run leaves? */
static int directory_used(const char *dir)
{
    DIR *listing = opendir(dir);
    struct dirent *entry;
    int used = 0;
    if (!listing) return 0;
    while ((entry = readdir(listing)))
        if (!strcmp(entry->d_name, "config.json") || !strcmp(entry->d_name, "log.jsonl") || !strncmp(entry->d_name, "step_", 5)) used = 1;
    closedir(listing);
    return used;
}

/* Says why there is no run in dir to go on with, and touches nothing. A run begins with its lock, then writes its options:
 * one that was killed in between may start anew. */
static int run_check(const char *dir, Error *error)
{
    char path[4200];
    struct stat status;
    if (stat(dir, &status)) return error_set(error, "--resume: --out %s: %s", dir, strerror(errno));
    if (!S_ISDIR(status.st_mode)) return error_set(error, "--resume: --out %s is not a directory", dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (!stat(path, &status)) {
        JsonDocument *document = json_read(path, error);
        if (!document) return -1;
        int others = json_root(document)->kind == JSON_OBJECT && !json_member(json_root(document), "save_every");
        json_free(document);
        if (!others) return 0;
        return error_set(error, "--resume: --out %s holds no run: looked in its config.json for the options of one, found "
                         "none (a checkpoint or model is started from with --init)", dir);
    }
    snprintf(path, sizeof path, "%s/.lock", dir);
    if (!stat(path, &status)) return 0;
    if (errno != ENOENT) return error_set(error, "--resume: %s: %s", path, strerror(errno));
    return error_set(error, "--resume: --out %s holds no run: looked for a config.json with its options, found none", dir);
}

int run_open(Run *run, const char *dir, int resume, Error *error)
{
    char path[4200];
    memset(run, 0, sizeof *run);
    run->lock = -1;
    if (!*dir) return resume ? error_set(error, "--resume needs --out DIR, the run to go on with") : 0;
    if (resume && run_check(dir, error)) return -1;
    if (directory_make(dir, error)) return -1;
    if (!resume && directory_used(dir))
        return error_set(error, "--out %s holds a run already: add --resume to go on with it, or name another directory", dir);
    snprintf(path, sizeof path, "%s/.lock", dir);
    run->lock = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
    if (run->lock < 0) return error_set(error, "--out %s cannot be written: %s", dir, strerror(errno));
    if (flock(run->lock, LOCK_EX | LOCK_NB)) {
        close(run->lock);
        run->lock = -1;
        return error_set(error, "--out %s is in use by another process that trains into it", dir);
    }
    run->dir = strdup(dir);
    return run->dir ? 0 : error_set(error, "not enough memory");
}

void run_close(Run *run)
{
    if (run->log) fclose(run->log);
    if (run->lock >= 0) close(run->lock);
    free(run->dir);
    memset(run, 0, sizeof *run);
    run->lock = -1;
}

int run_path(const Run *run, const char *name, char *out, size_t size, Error *error)
{
    if (snprintf(out, size, "%s/%s", run->dir, name) < (int)size) return 0;
    return error_set(error, "--out: the path is too long");
}

/* The step that a log line says it is of, or -1. */
static int64_t line_step(const char *line)
{
    long long step;
    return sscanf(line, "{\"step\": %lld", &step) == 1 ? step : -1;
}

/* Copies complete lines of `from` whose step is at most `step`. */
static void log_copy(FILE *from, FILE *to, int64_t step)
{
    char *line = NULL;
    size_t size = 0;
    ssize_t length;
    while ((length = getline(&line, &size, from)) > 0)
        if (line[length - 1] == '\n' && line_step(line) >= 0 && line_step(line) <= step) fwrite(line, 1, (size_t)length, to);
    free(line);
}

int run_log_open(Run *run, int64_t step, Error *error)
{
    char path[4200], temporary[4200];
    if (!run->dir) return 0;
    if (run_path(run, "log.jsonl", path, sizeof path, error) || run_path(run, ".log.jsonl.tmp", temporary, sizeof temporary, error))
        return -1;
    FILE *old = fopen(path, "r");
    if (!old && errno != ENOENT) return error_set(error, "%s: %s", path, strerror(errno));
    if (old) {
        FILE *kept = fopen(temporary, "w");
        int bad = !kept;
        if (kept) {
            log_copy(old, kept, step);
            bad = ferror(kept) || fflush(kept) || fsync(fileno(kept));
            if (fclose(kept)) bad = 1;
        }
        fclose(old);
        if (bad || rename(temporary, path)) {
            int cause = errno;
            remove(temporary);
            return error_set(error, "%s cannot be rewritten: %s", path, strerror(cause));
        }
    }
    run->log = fopen(path, "a");
    return run->log ? 0 : error_set(error, "%s cannot be written: %s", path, strerror(errno));
}

int run_log(Run *run, Error *error, const char *format, ...)
{
    va_list arguments;
    if (!run->log) return 0;
    va_start(arguments, format);
    vfprintf(run->log, format, arguments);
    va_end(arguments);
    fputc('\n', run->log);
    if (!fflush(run->log)) return 0;
    return error_set(error, "%s/log.jsonl cannot be written: %s", run->dir, strerror(errno));
}
