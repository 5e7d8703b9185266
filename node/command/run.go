// SPDX-License-Identifier: Apache-2.0

// Package command runs programs in the sandbox: their output, their ends, their records.
package command

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// grace is how long an interrupted command has to leave by itself.
const grace = 3 * time.Second

// Meter is what the sandbox's cgroup counts.
type Meter interface {
	Read() (cgroup.Usage, error)
}

// Config is what a Runner needs.
type Config struct {
	Spawner *spawn.Spawner
	Spool   *os.File // a directory the sandbox cannot reach
	Env     []string // default environment
	Cwd     string   // default directory
	Meter   Meter    // nil: no word on memory kills and refused forks
	Log     *slog.Logger
}

// Runner runs commands and remembers them.
type Runner struct {
	Config
	spool   *Spool
	journal *journal

	mu       sync.Mutex
	commands map[string]*Command
	order    []*Command             // by start
	keys     map[string]*repeatable // by Idempotency-Key; nil until there is one
	text     int                    // bytes of command lines held
	closed   bool
	running  sync.WaitGroup // goroutines that watch processes and pipes
}

// Command is one run, from before its start until its record is dropped.
type Command struct {
	log    *Log
	why    atomic.Int32 // cause
	before cgroup.Usage // when it began; zero where nothing counts
	done   chan struct{}

	mu    sync.Mutex
	proc  *spawn.Process // nil until it has started, and when it did not
	pipes []*pipe
	input *input      // nil: it reads nothing
	claim *repeatable // the Idempotency-Key it was started with; under the runner's lock
	stop  func()      // ends a foreign one, which has no process
	rec   Record
}

// NewRunner opens the spool. Records of an earlier run of the daemon are kept; commands without an end in them are
// lost.
func NewRunner(c Config) (*Runner, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	r := &Runner{Config: c, spool: newSpool(c.Spool), commands: map[string]*Command{}}
	j, err := openJournal(r.spool)
	if err != nil {
		return nil, fmt.Errorf("command: spool: %w", err)
	}
	r.journal = j
	r.recall()
	return r, nil
}

// recall takes over the records that are in the spool; files without one go.
func (r *Runner) recall() {
	defer r.spool.sweep(func(id string) bool { return r.commands[id] != nil })
	for _, rec := range r.journal.load() {
		if rec.End == nil {
			found := now()
			rec.FinishedAt = &found
			rec.End = &wire.CommandEnd{Reason: wire.CommandEndReasonLost, Message: "The sandbox's daemon was started anew while it ran."}
			r.journal.write(&rec)
		}
		c := &Command{log: r.spool.newLog(rec.ID), done: make(chan struct{}), rec: rec}
		c.log.recall(rec.Output, rec.Lost)
		close(c.done)
		r.commands[rec.ID] = c
		r.order = append(r.order, c)
		r.text += len(rec.Content)
	}
}

// Done is closed when the command has ended and its record is complete.
func (c *Command) Done() <-chan struct{} { return c.done }

// Pid is the process id; 0 when it did not start.
func (c *Command) Pid() int {
	if p := c.process(); p != nil {
		return p.Pid
	}
	return 0
}

func (c *Command) stdin() *input {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.input
}

func (c *Command) process() *spawn.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.proc
}

// Record gives what is known now.
func (c *Command) Record() Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec
}

// Find gives the command with that id.
func (r *Runner) Find(id string) (*Command, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.commands[id]
	if c == nil || c.expired(time.Now()) {
		return nil, reply.Errorf(wire.CodeCommandNotFound, "There is no command %q.", id)
	}
	return c, nil
}

// newest gives the commands that fit, newest first.
func (r *Runner) newest(most int, fits func(*Command) bool) (found []*Command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for _, c := range slices.Backward(r.order) {
		if len(found) == most {
			break
		}
		if !c.expired(now) && fits(c) {
			found = append(found, c)
		}
	}
	return found
}

func (c *Command) expired(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec.FinishedAt != nil && now.Sub(*c.rec.FinishedAt) > keepFor
}

// launch is a request that has been checked: what to start, and how it is remembered.
type launch struct {
	id      string
	content string
	argv    []string
	path    string // argv[0], found; empty: notFound says why not
	spec    spawn.Spec
	merge   bool // both streams through one pipe, so that their order is exact
	stdin   bool // its input stays open
	timeout time.Duration
	record  Record
}

// Run starts what a request asks for. The error is the caller's fault; a program that does not start is a command
// with an end.
func (r *Runner) Run(req *wire.RunCommandRequest, by Caller) (*Command, error) {
	l, err := r.prepare(req)
	if err != nil {
		return nil, err
	}
	defer l.spec.Dir.Close()
	l.id = newID()
	l.record.RequestID, l.record.Client, l.record.UserAgent = by.RequestID, by.Client, by.UserAgent
	l.spec.OOMScoreAdj = 500
	return r.start(l)
}

// RunEntrypoint starts the sandbox's main process.
func (r *Runner) RunEntrypoint(argv []string) (*Command, error) {
	dir, err := safefile.OpenDir(r.Cwd)
	if err != nil {
		return nil, fmt.Errorf("working directory %s: %w", r.Cwd, err)
	}
	defer dir.Close()
	env := r.environment(nil)
	l := &launch{id: EntrypointID, argv: argv, merge: true, spec: spawn.Spec{Env: env.list, Dir: dir}}
	l.content = quote(argv)
	l.path = find(argv[0], env)
	l.record.Background, l.record.Merged = true, true
	return r.start(l)
}

func (r *Runner) start(l *launch) (*Command, error) {
	c := &Command{done: make(chan struct{}), rec: l.record}
	c.rec.ID, c.rec.Content, c.rec.StartedAt = l.id, shorten(l.content), now()
	c.before, _ = r.measure()
	if err := r.admit(c); err != nil {
		return nil, err
	}
	if err := r.spawn(c, l); err != nil {
		r.end(c, startFailed(l.argv[0], err))
		r.running.Done()
		return c, nil
	}
	var timer *time.Timer
	if l.timeout > 0 {
		timer = time.AfterFunc(l.timeout, func() { r.kill(c, byTimeout) })
	}
	// Before anyone can write its end: the last line of an id is the one that counts. The program runs meanwhile.
	full := r.journal.write(&c.rec)
	go r.watch(c, timer)
	if r.isClosed() {
		// Close came between admit and now, and could not see the process.
		r.kill(c, byShutdown)
	}
	if full {
		r.compact()
	}
	return c, nil
}

// admit makes the command known and counts its goroutine, unless the sandbox is ending.
func (r *Runner) admit(c *Command) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return reply.Errorf(wire.CodeRuntimeError, "The sandbox is ending.")
	}
	r.prune()
	r.running.Add(1)
	c.log = r.spool.newLog(c.rec.ID)
	r.commands[c.rec.ID] = c
	r.order = append(r.order, c)
	r.text += len(c.rec.Content)
	return nil
}

func (r *Runner) isClosed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.closed
}

// prune drops records that are too old or too many, oldest first, never one that runs.
func (r *Runner) prune() {
	now, kept := time.Now(), r.order[:0]
	excess := len(r.order) + 1 - keepRecords
	for i, c := range r.order {
		over := excess > 0 || r.text > keepText
		if !over && !c.expired(now) {
			if c.ended() {
				kept = append(kept, r.order[i:]...)
				break // the rest is younger
			}
			kept = append(kept, c)
			continue
		}
		if !c.ended() {
			kept = append(kept, c)
			continue
		}
		excess--
		r.text -= len(c.rec.Content)
		delete(r.commands, c.rec.ID)
		r.disclaim(c.claim)
		r.spool.forget(c.log)
	}
	clear(r.order[len(kept):])
	r.order = kept
}

func (c *Command) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// compact rewrites the journal with the records that are still held.
func (r *Runner) compact() {
	err := r.journal.rewrite(func() []Record {
		r.mu.Lock()
		defer r.mu.Unlock()
		records := make([]Record, 0, len(r.order))
		for _, c := range r.order {
			records = append(records, c.Record())
		}
		return records
	})
	if err != nil {
		r.Log.Error("rewriting the journal", "error", err)
	}
}

// spawn makes the pipes and starts the process.
func (r *Runner) spawn(c *Command, l *launch) error {
	if l.path == "" {
		return os.ErrNotExist
	}
	count := 2
	if l.merge {
		count = 1
	}
	var ends [2]*os.File
	var pipes []*pipe
	discard := func() {
		for _, p := range pipes {
			_ = p.file.Close()
		}
	}
	for i := range count {
		p, w, err := newPipe(Stream(i))
		if err != nil {
			discard()
			return err
		}
		defer w.Close()
		pipes, ends[i] = append(pipes, p), w
	}
	if l.merge {
		ends[1] = ends[0]
	}
	var in *input
	if l.stdin {
		var theirs *os.File
		var err error
		if in, theirs, err = newInput(); err != nil {
			discard()
			return err
		}
		defer theirs.Close()
		l.spec.Stdin = theirs
	}
	spec := l.spec
	spec.Path, spec.Args, spec.Stdout, spec.Stderr = l.path, l.argv, ends[0], ends[1]
	proc, err := r.Spawner.Start(spec)
	if err == unix.EAGAIN && r.reclaim(nil) != nil {
		// The killed count until they are reaped, and nobody tells when that is.
		for try := 0; err == unix.EAGAIN && try < 100; try++ {
			time.Sleep(10 * time.Millisecond)
			c.before, _ = r.measure() // that its own start was refused is not what it did
			proc, err = r.Spawner.Start(spec)
		}
	}
	if err != nil {
		discard()
		if in != nil {
			in.close(closedByEnd)
		}
		return err
	}
	c.mu.Lock()
	c.proc, c.pipes, c.input = proc, pipes, in
	c.mu.Unlock()
	c.log.opened(len(pipes))
	r.running.Add(len(pipes))
	for _, p := range pipes {
		go func() {
			defer r.running.Done()
			p.copy(c.log)
		}()
	}
	return nil
}

// watch waits for the end and records it.
func (r *Runner) watch(c *Command, timer *time.Timer) {
	defer r.running.Done()
	<-c.proc.Done()
	if timer != nil {
		timer.Stop()
	}
	if c.input != nil {
		c.input.close(closedByEnd)
	}
	// All it wrote is in the pipes now. What is left of it may hold them open for ever and is not waited for.
	for _, p := range c.pipes {
		p.drain(c.log)
	}
	status, known := c.proc.Status()
	var kills, refused int64
	last, ok := r.measure()
	if ok {
		kills, refused = last.OOMKills-c.before.OOMKills, last.PidsRefused-c.before.PidsRefused
	}
	end := classify(status, known, cause(c.why.Load()), kills)
	if known {
		cpu, peak := c.proc.Usage()
		ms := cpu.Milliseconds()
		end.CPUMs, end.PeakMemoryBytes = &ms, &peak
	}
	if refused > 0 {
		r.crowded(c, end, last)
	}
	r.end(c, end)
}

// end completes the record and lets everyone who waits know.
func (r *Runner) end(c *Command, end *wire.CommandEnd) {
	finished := now()
	output, lost, failed := c.log.extent()
	if lost > 0 || failed != nil {
		yes := true
		end.OutputTruncated = &yes
		if failed != nil {
			note(end, "Output was lost: "+failed.Error())
			r.Log.Error("storing output", "command", c.rec.ID, "error", failed)
		}
	}
	c.mu.Lock()
	c.rec.FinishedAt, c.rec.End, c.rec.Output, c.rec.Lost = &finished, end, output, lost
	rec := c.rec
	c.mu.Unlock()
	close(c.done)
	// The record is complete before a reader can see that nothing more will come.
	c.log.finish(output)
	if r.journal.write(&rec) {
		r.compact()
	}
}

// Interrupt ends a command: SIGTERM to all that came out of it, and SIGKILL to those still there after three
// seconds. It returns when the command has ended.
func (r *Runner) Interrupt(ctx context.Context, id string) error {
	c, err := r.Find(id)
	if err != nil {
		return err
	}
	if id == EntrypointID {
		return reply.Errorf(wire.CodeRuntimeError, "The entry point is the sandbox's main process.").WithHint("Delete the sandbox to end it.")
	}
	c.mu.Lock()
	proc, stop := c.proc, c.stop
	c.mu.Unlock()
	if c.ended() || proc == nil && stop == nil {
		return reply.Errorf(wire.CodeRuntimeError, "Command %s has already ended.", id).WithHint("Ask for its status to see how.")
	}
	if stop != nil {
		stop()
	} else {
		c.terminate(proc)
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// terminate asks all that came out of a command to leave, and ends those that do not.
func (c *Command) terminate(proc *spawn.Process) {
	c.why.CompareAndSwap(int32(nobody), int32(byInterrupt))
	tree := proc.Tree()
	defer tree.Close()
	tree.Terminate()
	// Whoever was forked while the others were being asked was not asked.
	if !tree.WaitGone(time.Now().Add(grace)) || tree.Scan() > 0 {
		tree.Kill()
	}
}

// Terminate ends the entry point, giving it time to leave by itself, and waits for its end.
func (r *Runner) Terminate(c *Command) {
	c.why.CompareAndSwap(int32(nobody), int32(byShutdown))
	proc := c.process()
	tree := proc.Tree()
	defer tree.Close()
	tree.Scan()
	_ = proc.SignalGroup(unix.SIGTERM)
	select {
	case <-c.done:
		return
	case <-time.After(grace):
	}
	tree.Kill()
	<-c.done
}

// kill ends a command at once, with all that came out of it.
func (r *Runner) kill(c *Command, why cause) {
	proc := c.process()
	if proc == nil || c.ended() {
		return
	}
	c.why.CompareAndSwap(int32(nobody), int32(why))
	tree := proc.Tree()
	defer tree.Close()
	tree.Kill()
	// Also where /proc could not be read.
	_ = proc.SignalGroup(unix.SIGKILL)
}

// Close refuses new commands, ends the running ones and waits for them, but not longer than ctx allows.
func (r *Runner) Close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	all := append([]*Command(nil), r.order...)
	r.mu.Unlock()
	for _, c := range all {
		r.kill(c, byShutdown)
	}
	for _, c := range all {
		select {
		case <-c.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		// Somebody who left the command's tree may still hold a pipe.
		c.mu.Lock()
		for _, p := range c.pipes {
			_ = p.file.Close()
		}
		c.mu.Unlock()
	}
	r.running.Wait()
	r.journal.close()
	return nil
}

// now is the time in the precision that every client can parse.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// shorten bounds what is kept of a command line.
func shorten(content string) string {
	if len(content) <= keepContent {
		return content
	}
	return strings.ToValidUTF8(content[:keepContent], "") + "…"
}

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
