#include "trainer/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trainer/crash.h"

volatile sig_atomic_t process_stop;

static void stop_handler(int number) { process_stop = number; }

static void cut_handler(int number)
{
    static const char text[] = "train_gpt: a file that was being read became shorter (SIGBUS): shards and checkpoints must not change under a run\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(1);
    _exit(1);
}

void process_prepare(void)
{
    static const int stops[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    struct sigaction action;
    for (int descriptor = 0; descriptor <= 2; descriptor++)
        if (fcntl(descriptor, F_GETFD) < 0 && open("/dev/null", descriptor ? O_WRONLY : O_RDONLY) != descriptor) _exit(1);
    memset(&action, 0, sizeof action);
    action.sa_handler = stop_handler;
    action.sa_flags = (int)(SA_RESETHAND | SA_RESTART);
    for (size_t i = 0; i < sizeof stops / sizeof stops[0]; i++) {
        struct sigaction before;
        /* What the parent had ignored (nohup ignores SIGHUP) stays ignored. */
        if (!sigaction(stops[i], NULL, &before) && before.sa_handler != SIG_IGN) sigaction(stops[i], &action, NULL);
    }
    action.sa_handler = cut_handler;
    sigaction(SIGBUS, &action, NULL);
    signal(SIGXFSZ, SIG_IGN);
}

void process_blame(const char *path)
{
    crash_words("train_gpt: crashed, most likely in the attention kernel %s, which is from outside (build/tests/test_attention "
                "and build/dev/bench_attention check it)", path);
}

int process_flush(Error *error)
{
    errno = 0;
    if (!fflush(stdout) && !ferror(stdout)) return 0;
    if (process_stop) return STATUS_STOPPED;
    /* An earlier flush may have met the fault: its cause is gone by now, the stream's error is not. */
    if (errno) error_set(error, "standard output cannot be written: %s", strerror(errno));
    else error_set(error, "standard output could not be written in full");
    return STATUS_MACHINE;
}
