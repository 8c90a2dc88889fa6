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
 * A stream that is being captured keeps its closures for the graph, on a lane of it. A stream that waits for an event that was
 * recorded there joins the capture with a lane of its own. A graph launched is one piece of work of its stream: the lanes'
 * closures in an order drawn at random, of those that the waits between them allow; at times one lane does all it can before
 * the others, so that each is as early, and as late, as it may be.
 */
#include <time.h>

#include <deque>
#include <memory>
#include <vector>

#include "simt_machine.h"

/* A closure, or where there is none, a wait until `point` pieces of a lane are done. */
struct Piece {
    std::function<void()> work;
    size_t lane, point;
};
typedef std::vector<std::vector<Piece>> Lanes;

/* What is being captured. Lane 0 is that of the stream where it began. */
struct Capture {
    Lanes lanes;
    cudaStreamCaptureMode mode;
    bool spoiled, ended;
};

/* What outlives its handle: an event may speak of a stream that is destroyed. */
struct Queue {
    bool waits_for_default; /* as streams do that are not made cudaStreamNonBlocking */
    std::deque<std::function<void()>> work;
    uint64_t queued, done; /* since the stream was made */
};

struct CUstream_st {
    std::shared_ptr<Queue> queue;
    std::shared_ptr<Capture> capture; /* NULL: it is not being captured */
    size_t lane;
};

struct CUevent_st {
    std::shared_ptr<Queue> queue; /* where it was recorded; NULL: nowhere yet, or on the default stream */
    uint64_t point;               /* after how much work there, or on the lane */
    std::shared_ptr<timespec> time;
    std::shared_ptr<Capture> capture; /* where it was recorded in a capture: that and the lane */
    size_t lane;
};

struct CUgraph_st { Lanes lanes; };
struct CUgraphExec_st { std::shared_ptr<const Lanes> lanes; };

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

bool simt_capturing(cudaStream_t stream) { return stream && stream->capture; }

static cudaError_t capture_spoil(cudaStream_t stream, cudaError_t error, const char *call)
{
    fprintf(stderr, "simt: %s while a stream is being captured\n", call);
    stream->capture->spoiled = true;
    return simt_error_set(error);
}

bool simt_capture_forbids(const char *call)
{
    for (CUstream_st *stream : streams)
        if (stream->capture && stream->capture->mode != cudaStreamCaptureModeRelaxed) {
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
            if (other->capture) return capture_spoil(other, cudaErrorStreamCaptureImplicit, "work on the default stream");
            queue_finish(other->queue);
        }
        work();
        return cudaSuccess;
    }
    if (stream->capture) {
        stream->capture->lanes[stream->lane].push_back({std::move(work), 0, 0});
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
    *stream = new CUstream_st{std::make_shared<Queue>(), nullptr, 0};
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
    *event = new CUevent_st{nullptr, 0, std::make_shared<timespec>(), nullptr, 0};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    event->capture = stream ? stream->capture : nullptr;
    if (simt_capturing(stream)) {
        event->lane = stream->lane;
        event->point = stream->capture->lanes[stream->lane].size();
        return cudaSuccess;
    }
    std::shared_ptr<timespec> time = event->time = std::make_shared<timespec>();
    event->queue = stream ? stream->queue : nullptr;
    event->point = stream ? stream->queue->queued + 1 : 0;
    return simt_queue(stream, [time] { clock_gettime(CLOCK_MONOTONIC, time.get()); });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (event->capture) return simt_error_set(cudaErrorCapturedEvent);
    if (event->queue) queue_advance(event->queue, event->point);
    return simt_faulted() ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    const std::shared_ptr<Capture> &capture = event->capture;
    if (simt_capturing(stream) && stream->capture != capture)
        return capture_spoil(stream, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent for an event outside");
    if (capture) {
        if (!stream || capture->ended) return simt_error_set(cudaErrorCapturedEvent);
        if (!stream->capture) {
            stream->capture = capture;
            stream->lane = capture->lanes.size();
            capture->lanes.emplace_back();
        }
        capture->lanes[stream->lane].push_back({nullptr, event->lane, (size_t)event->point});
        return cudaSuccess;
    }
    if (!event->queue) return cudaSuccess;
    std::shared_ptr<Queue> queue = event->queue;
    uint64_t point = event->point;
    return simt_queue(stream, [queue, point] { queue_advance(queue, point); });
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (start->capture || end->capture) return simt_error_set(cudaErrorCapturedEvent);
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
    if (stream->capture) return simt_error_set(cudaErrorInvalidValue);
    stream->capture = std::make_shared<Capture>(Capture{Lanes(1), mode, false, false});
    stream->lane = 0;
    return cudaSuccess;
}

/* How much of each lane is done once `point` pieces of `lane` are, at least: `done` grows. */
static void lanes_reach(const Lanes &lanes, std::vector<size_t> &done, size_t lane, size_t point)
{
    while (done[lane] < point) {
        const Piece &piece = lanes[lane][done[lane]++];
        if (!piece.work) lanes_reach(lanes, done, piece.lane, piece.point);
    }
}

/* Is all work of all lanes waited for by lane 0? */
static bool lanes_joined(const Lanes &lanes)
{
    std::vector<size_t> done(lanes.size(), 0);
    lanes_reach(lanes, done, 0, lanes[0].size());
    for (size_t lane = 0; lane < lanes.size(); lane++)
        for (size_t i = done[lane]; i < lanes[lane].size(); i++)
            if (lanes[lane][i].work) return false;
    return true;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    *graph = nullptr;
    if (!simt_capturing(stream)) return simt_error_set(cudaErrorInvalidValue);
    if (stream->lane) return simt_error_set(cudaErrorStreamCaptureUnmatched);
    std::shared_ptr<Capture> capture = stream->capture;
    capture->ended = true;
    for (CUstream_st *other : streams)
        if (other->capture == capture) other->capture = nullptr;
    if (capture->spoiled) return simt_error_set(cudaErrorStreamCaptureInvalidated);
    if (!lanes_joined(capture->lanes)) return simt_error_set(cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st{std::move(capture->lanes)};
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    *status = !simt_capturing(stream)     ? cudaStreamCaptureStatusNone
              : stream->capture->spoiled ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long)
{
    *executable = new CUgraphExec_st{std::make_shared<const Lanes>(graph->lanes)};
    return cudaSuccess;
}

/* Does the pieces of all lanes. In half of the cases one lane, drawn at random, goes first wherever it can, and in a quarter
 * last; which is next is drawn anew for each piece otherwise. */
static void lanes_run(const Lanes &lanes)
{
    std::vector<size_t> done(lanes.size(), 0);
    size_t favoured = (size_t)simt_random_below(lanes.size());
    uint64_t habit = simt_random_below(4);
    for (;;) {
        std::vector<size_t> ready;
        for (size_t lane = 0; lane < lanes.size(); lane++) {
            if (done[lane] == lanes[lane].size()) continue;
            const Piece &next = lanes[lane][done[lane]];
            if (next.work || done[next.lane] >= next.point) ready.push_back(lane);
        }
        if (ready.empty()) return;
        size_t chosen = ready[(size_t)simt_random_below(ready.size())];
        for (size_t lane : ready) {
            if (habit < 2 && lane == favoured) chosen = lane;
            if (habit == 2 && chosen == favoured) chosen = lane;
        }
        const Piece &piece = lanes[chosen][done[chosen]++];
        if (piece.work) piece.work();
    }
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    std::shared_ptr<const Lanes> lanes = executable->lanes;
    return simt_queue(stream, [lanes] { lanes_run(*lanes); });
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
