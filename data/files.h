/* files.h - paths, and writes that are on the disk when they return. Every function here fails with a sentence that names
 * the path and what the system said. */
#ifndef FILES_H
#define FILES_H

#include <stddef.h>
#include <stdio.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FILES_PATH = 4096 };

/* out = DIR/NAME. Returns 0, or -1 where it is too long. */
int files_join(char out[FILES_PATH], const char *dir, const char *name, Error *error);
/* out = path, behind the working directory where it is relative. Returns 0, or -1 where that is too long or unknown. */
int files_absolute(char out[FILES_PATH], const char *path, Error *error);
/* 1 or 0; a symbolic link counts as what it points to. */
int files_is_directory(const char *path);
int files_is_regular(const char *path);

/* Opens a file to be read, as fopen does, but waits for no writer where it is a FIFO, which is empty then. Returns NULL with
 * errno set where it cannot. */
FILE *files_open(const char *path);
/* Writes a file that must not exist, all of it, and fsyncs it. Returns 0 or -1. */
int files_write(const char *path, const void *data, size_t bytes, Error *error);
/* Makes the names in a directory last. Returns 0 or -1. */
int files_sync_directory(const char *path, Error *error);
/* Removes a file, or a directory with all in it; one that is not there is removed. Returns 0 or -1. */
int files_remove(const char *path, Error *error);

#ifdef __cplusplus
}
#endif
#endif
