/* simt_streams.cpp - streams, events and graphs of the emulated runtime: when queued work is done.
 *
 * A stream is a queue of closures. When each is done is drawn at random: after every call that queues something, each stream
 * may do all that it holds, or wait longer. So work is done as early as the call that queues it and as late as the
 * synchronisation that waits for it, and streams overtake one another as far as events let them:
 *
 *     stream 0   copy  kernel      wait(event)  kernel
 *     stream 1          copy  record(event)               wait does what stream 1 holds up to the event
 *
 * A host buffer that is reused too soon, a result that is read too soon, a stream that should have waited for another: all
 * of them give other results for some seed. Copies from pageable memory take what it holds at the call, and copies to it are
 * done on return, as CUDA says.
 *
 * A stream that is being captured keeps its closures for the graph. A graph launched queues them all.
 */
#include <time.h>

#include <deque>
#include <memory>
#include <vector>

#include "simt_machine.h"

typedef std::vector<std::function<void()>> WorkList;

/* What outlives its handle: an event may speak of a stream that is destroyed. */
struct Queue {
    bool waits_for_default; /* as streams do that are not made cudaStreamNonBlocking */
    std::deque<std::function<void()>> work;
    uint64_t queued, done; /* since the stream was made */
};

struct CUstream_st {
    std::shared_ptr<Queue> queue;
    bool captures, spoiled;
    cudaStreamCaptureMode mode;
    WorkList captured;
};

struct CUevent_st {
    std::shared_ptr<Queue> queue; /* where it was recorded; NULL: nowhere yet, or on the default stream */
    uint64_t point;               /* after how much work there */
    std::shared_ptr<timespec> time;
};

struct CUgraph_st { WorkList work; };
struct CUgraphExec_st { std::shared_ptr<const WorkList> work; };

static std::vector<CUstream_st *> streams;

/* --- order --------------------------------------------------------------------------------------------------------- */

/* Does what the queue holds until `point` pieces of its work are done. Work may be a wait, which does that of another queue;
 * it waits for what was queued earlier, so this ends. */
static void queue_advance(const std::shared_ptr<Queue> &queue, uint64_t point)
{
    while (queue->done < point) {
        std::function<void()> work = std::move(queue->work.front());
        queue->work.pop_front();
        work();
        queue->done++;
    }
}

static void queue_finish(const std::shared_ptr<Queue> &queue) { queue_advance(queue, queue->queued); }

void simt_streams_finish(void)
{
    for (CUstream_st *stream : streams) queue_finish(stream->queue);
}

/* Some streams get on, some do not. */
static void streams_draw(void)
{
    for (CUstream_st *stream : streams)
        if (simt_random_below(4) == 0) queue_finish(stream->queue);
}

bool simt_capturing(cudaStream_t stream) { return stream && stream->captures; }

static cudaError_t capture_spoil(cudaStream_t stream, cudaError_t error, const char *call)
{
    fprintf(stderr, "simt: %s while a stream is being captured\n", call);
    stream->spoiled = true;
    return simt_error_set(error);
}

bool simt_capture_forbids(const char *call)
{
    for (CUstream_st *stream : streams)
        if (stream->captures && stream->mode != cudaStreamCaptureModeRelaxed) {
            capture_spoil(stream, cudaErrorStreamCaptureUnsupported, call);
            return true;
        }
    return false;
}

cudaError_t simt_queue(cudaStream_t stream, std::function<void()> work)
{
    if (!stream) {
        for (CUstream_st *other : streams) {
            if (!other->queue->waits_for_default) continue;
            if (other->captures) return capture_spoil(other, cudaErrorStreamCaptureImplicit, "work on the default stream");
            queue_finish(other->queue);
        }
        work();
        return cudaSuccess;
    }
    if (stream->captures) {
        stream->captured.push_back(std::move(work));
        return cudaSuccess;
    }
    stream->queue->work.push_back(std::move(work));
    stream->queue->queued++;
    streams_draw();
    return cudaSuccess;
}

/* --- streams ------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    *stream = new CUstream_st{std::make_shared<Queue>(), false, false, cudaStreamCaptureModeGlobal, {}};
    (*stream)->queue->waits_for_default = !(flags & cudaStreamNonBlocking);
    streams.push_back(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == stream) {
            queue_finish(stream->queue);
            streams.erase(streams.begin() + (ptrdiff_t)i);
            delete stream;
            return cudaSuccess;
        }
    return simt_error_set(cudaErrorInvalidValue);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    if (simt_capturing(stream)) return capture_spoil(stream, cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
    if (stream) queue_finish(stream->queue);
    else return simt_queue(nullptr, [] {});
    return simt_faulted() ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    if (simt_capture_forbids("cudaDeviceSynchronize")) return cudaErrorStreamCaptureUnsupported;
    simt_streams_finish();
    return simt_faulted() ? cudaErrorLaunchFailure : cudaSuccess;
}

/* --- events -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = new CUevent_st{nullptr, 0, std::make_shared<timespec>()};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (simt_capturing(stream)) return capture_spoil(stream, cudaErrorNotSupported, "cudaEventRecord (not emulated)");
    std::shared_ptr<timespec> time = event->time = std::make_shared<timespec>();
    event->queue = stream ? stream->queue : nullptr;
    event->point = stream ? stream->queue->queued + 1 : 0;
    return simt_queue(stream, [time] { clock_gettime(CLOCK_MONOTONIC, time.get()); });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (event->queue) queue_advance(event->queue, event->point);
    return simt_faulted() ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    if (simt_capturing(stream))
        return capture_spoil(stream, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent for an event outside");
    if (!event->queue) return cudaSuccess;
    std::shared_ptr<Queue> queue = event->queue;
    uint64_t point = event->point;
    return simt_queue(stream, [queue, point] { queue_advance(queue, point); });
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (start->queue) queue_advance(start->queue, start->point);
    if (end->queue) queue_advance(end->queue, end->point);
    *milliseconds = (float)((double)(end->time->tv_sec - start->time->tv_sec) * 1e3 +
                            (double)(end->time->tv_nsec - start->time->tv_nsec) * 1e-6);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

/* --- graphs -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    if (!stream) return simt_error_set(cudaErrorStreamCaptureUnsupported);
    if (stream->captures) return simt_error_set(cudaErrorInvalidValue);
    stream->captures = true;
    stream->spoiled = false;
    stream->mode = mode;
    stream->captured.clear();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    *graph = nullptr;
    if (!simt_capturing(stream)) return simt_error_set(cudaErrorInvalidValue);
    stream->captures = false;
    if (stream->spoiled) return simt_error_set(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st{std::move(stream->captured)};
    stream->captured.clear();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    *status = !simt_capturing(stream) ? cudaStreamCaptureStatusNone
              : stream->spoiled       ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long)
{
    *executable = new CUgraphExec_st{std::make_shared<const WorkList>(graph->work)};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    std::shared_ptr<const WorkList> work = executable->work;
    return simt_queue(stream, [work] { for (const auto &piece : *work) piece(); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    delete executable;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}
