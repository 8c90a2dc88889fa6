#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int files_join(char out[FILES_PATH], const char *dir, const char *name, Error *error)
{
    if (snprintf(out, FILES_PATH, "%s/%s", dir, name) < FILES_PATH) return 0;
    return error_set(error, "%.200s.../%s: the path is longer than %d bytes", dir, name, FILES_PATH - 1);
}

int files_absolute(char out[FILES_PATH], const char *path, Error *error)
{
    char here[FILES_PATH];
    if (*path == '/') return files_join(out, "", path + 1, error);
    if (!getcwd(here, sizeof here))
        return error_set(error, "%s: the working directory, which it starts from, is unknown: %s", path, strerror(errno));
    return files_join(out, strcmp(here, "/") ? here : "", path, error);
}

int files_is_directory(const char *path)
{
    struct stat status;
    return !stat(path, &status) && S_ISDIR(status.st_mode);
}

int files_is_regular(const char *path)
{
    struct stat status;
    return !stat(path, &status) && S_ISREG(status.st_mode);
}

FILE *files_open(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *stream = file < 0 ? NULL : fdopen(file, "r");
    if (!stream && file >= 0) close(file);
    return stream;
}

int files_write(const char *path, const void *data, size_t bytes, Error *error)
{
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), fault = 0;
    if (file < 0) return error_set(error, "%s: cannot create it: %s", path, strerror(errno));
    for (size_t at = 0; at < bytes && !fault;) {
        ssize_t done = write(file, (const char *)data + at, bytes - at);
        if (done >= 0) at += (size_t)done;
        else if (errno != EINTR) fault = errno;
    }
    if (!fault && fsync(file)) fault = errno;
    if (close(file) && !fault) fault = errno;
    return fault ? error_set(error, "%s: cannot write it: %s", path, strerror(fault)) : 0;
}

int files_sync_directory(const char *path, Error *error)
{
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), fault;
    if (directory < 0) return error_set(error, "%s: cannot open it: %s", path, strerror(errno));
    fault = fsync(directory) ? errno : 0;
    close(directory);
    return fault ? error_set(error, "%s: cannot fsync it: %s", path, strerror(fault)) : 0;
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *position)
{
    (void)status;
    (void)type;
    (void)position;
    return remove(path);
}

int files_remove(const char *path, Error *error)
{
    if (!nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) || errno == ENOENT) return 0;
    return error_set(error, "%s: cannot remove it: %s", path, strerror(errno));
}
