// SPDX-License-Identifier: Apache-2.0

package code

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	keepIdle = 32 << 10    // bytes of each stream that are kept between two cells
	askAgain = time.Second // after an interrupt that did not help

	lastWords = 500 * time.Millisecond // for what a kernel said before it ended
)

// graceTime is what a cell has to stop once it was asked to. Tests shorten it.
var graceTime = 3 * time.Second

// kernel is the process behind a context.
type kernel interface {
	// start hands a cell over; its lines come afterwards.
	start(count int, code string, envs map[string]string) error
	// interrupt asks the cell that runs to stop. It may be called again.
	interrupt()
	// lines are what the kernel says; closed when it will say nothing more.
	lines() <-chan message
	// drain moves what the cell has written so far to the context; settle waits for who is at it.
	drain()
	settle()
	// ended is closed when the process has ended; status is how, as far as it is known.
	ended() <-chan struct{}
	status() (status syscall.WaitStatus, known bool)
	// kill ends the process and all that came out of it, also when it has ended already. close gives everything back.
	kill()
	close()
	pid() int
}

// codeContext is one of the API's.
type codeContext struct {
	api      *API
	id       string
	language string
	created  time.Time
	kernel   kernel

	cells  chan *cell
	gone   chan struct{} // closed when it is to end
	once   sync.Once
	buried chan struct{} // closed when it has ended

	mu      sync.Mutex
	cwd     string
	count   int
	cell    *cell // the one that runs
	dead    bool
	idle    [2][]byte // what came between two cells, of each stream
	dropped int64     // bytes of it that had no room
}

func (a *API) start(language, cwd string, envs map[string]string) (*codeContext, error) {
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	c := &codeContext{
		api: a, id: hex.EncodeToString(random[:]), language: language, created: time.Now().UTC().Truncate(time.Microsecond),
		cells: make(chan *cell, 1), gone: make(chan struct{}), buried: make(chan struct{}),
	}
	var err error
	switch language {
	case "bash":
		c.kernel, c.cwd, err = a.startBash(c, cwd, envs)
	default:
		c.kernel, c.cwd, err = a.startPython(c, cwd, envs)
	}
	if err == nil {
		return c, nil
	}
	var fault *reply.Fault
	if errors.As(err, &fault) {
		return nil, err
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil, reply.Errorf(wire.CodeNotSupported, "This sandbox has no %s.", language).
			WithHint("Install it so that it is found in PATH, or use an image that has it.")
	}
	return nil, command.StartFault("The kernel for "+language, language, err)
}

func (c *codeContext) info() wire.CodeContext {
	c.mu.Lock()
	defer c.mu.Unlock()
	busy := c.cell != nil
	// A cell may have changed it.
	if dir, err := os.Readlink("/proc/" + strconv.Itoa(c.kernel.pid()) + "/cwd"); err == nil && strings.HasPrefix(dir, "/") {
		c.cwd = strings.ToValidUTF8(dir, "?")
	}
	return wire.CodeContext{ID: c.id, Language: c.language, Cwd: c.cwd, CreatedAt: c.created, Busy: &busy}
}

// run hands a cell to the context.
func (c *codeContext) run(body *wire.RunCodeRequest, req *http.Request) (*cell, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.dead:
		return nil, reply.Errorf(wire.CodeContextNotFound, "The context %s has just ended.", c.id)
	case c.cell != nil:
		return nil, reply.Errorf(wire.CodeContextBusy, "session is busy: the context %s runs another cell.", c.id)
	}
	f, err := c.api.Runner.Begin(body.Code, c.cwd, req)
	if err != nil {
		return nil, err
	}
	c.count++
	x := newCell(c, f, c.count, body)
	for stream, data := range c.idle {
		if len(data) > 0 {
			f.Write(command.Stream(stream), data)
			c.idle[stream] = nil
		}
	}
	if c.dropped > 0 {
		x.add(event{ExecutionEvent: status(strconv.FormatInt(c.dropped, 10) + " bytes that came since the last cell were dropped.")})
		c.dropped = 0
	}
	c.cell = x
	f.Interruptible(x.interrupt)
	c.cells <- x // there is room: live took the one before when it was the one that ran
	return x, nil
}

// output gets what the kernel and its programs write. Between two cells a little is kept for the next.
func (c *codeContext) output(stream command.Stream, data []byte) {
	c.mu.Lock()
	current := c.cell
	if current == nil {
		idle := append(c.idle[stream], data...)
		if over := len(idle) - keepIdle; over > 0 {
			idle = append(idle[:0], idle[over:]...)
			c.dropped += int64(over)
		}
		c.idle[stream] = idle
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	// Not under the lock, because a slow disk or reader may hold it up. The cell cannot end meanwhile: before it does,
	// it drains, for which it needs the lock that the pump holds now.
	current.Write(stream, data)
}

// live is the context's life.
func (c *codeContext) live() {
	defer close(c.buried)
	why := ""
	lines := c.kernel.lines()
	for why == "" {
		select {
		case x := <-c.cells:
			why = c.watch(x)
		case m, open := <-lines:
			// Nobody waits for it, and it would hold what others need.
			c.api.lines.release(m.held)
			if !open {
				lines = nil
			}
		case <-c.kernel.ended():
			why = "its kernel ended between two cells."
			if status, known := c.kernel.status(); known && status.Signaled() {
				why = "its kernel was killed between two cells."
			}
		case <-c.gone:
			why = "it was deleted."
		}
	}
	c.retire(why)
	c.kernel.kill()
	// Whoever came in before that gets an answer.
	select {
	case x := <-c.cells:
		c.lose(x, &wire.CommandEnd{Reason: wire.CommandEndReasonLost, Message: "The context ended: " + why}, why)
	default:
	}
	c.kernel.close()
}

// retire lets nobody in any more.
func (c *codeContext) retire(why string) {
	c.mu.Lock()
	c.dead = true
	c.mu.Unlock()
	c.api.forget(c, why)
}

// lose ends a cell together with its context.
func (c *codeContext) lose(x *cell, end *wire.CommandEnd, why string) string {
	c.retire(why) // first, so that who hears of the end does not find the context again
	x.lost = true
	c.finish(x, end)
	return why
}

// delete ends the context; when it returns, all its processes are gone.
func (c *codeContext) delete() {
	c.once.Do(func() { close(c.gone) })
	<-c.buried
}

// interrupt asks the cell that runs to stop, and waits for that.
func (c *codeContext) interrupt(ctx context.Context) error {
	c.mu.Lock()
	x := c.cell
	c.mu.Unlock()
	if x == nil {
		return nil // it may just have ended by itself, which no client can know
	}
	x.interrupt()
	timer := time.NewTimer(graceTime)
	defer timer.Stop()
	select {
	case <-x.Done():
		return nil
	case <-timer.C:
		return reply.Errorf(wire.CodeRuntimeError, "The cell was asked to stop and has not done so within %s.", graceTime).
			WithHint("Delete the context to end it; what its cells have defined is gone then.")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// watch waits for the end of a cell and records it. It says why the context is at its end too, if it is.
func (c *codeContext) watch(x *cell) (lost string) {
	var expired, again, enough <-chan time.Time
	if x.timeout > 0 {
		timer := time.NewTimer(x.timeout)
		defer timer.Stop()
		expired = timer.C
	}
	if err := c.kernel.start(x.count, x.code, x.envs); err != nil {
		c.api.Log.Warn("handing a cell to its kernel", "context", c.id, "error", err)
		c.kernel.kill()
	}
	var until time.Time // an interrupt is repeated; the first may only have ended what the cell was waiting for
	stop := func() {
		until = time.Now().Add(graceTime)
		c.kernel.interrupt()
		again = time.After(askAgain)
	}
	ended := c.kernel.ended()
	var patience <-chan time.Time // when the kernel has ended
	for {
		lines := c.kernel.lines()
		room := x.waitRoom()
		if x.why != "" {
			room = nil // it is to end, also when its client does not read
		}
		if room != nil {
			lines = nil
		}
		select {
		case m, open := <-lines:
			if !open {
				return c.died(x)
			}
			if c.heed(x, &m) {
				c.finish(x, x.end())
				return ""
			}
		case <-room:
		case <-ended:
			// What it said last may still be on its way; somebody it forked may hold its line open for ever.
			ended, patience = nil, time.After(lastWords)
		case <-patience:
			return c.died(x)
		case <-expired:
			x.why = wire.CommandEndReasonTimedOut
			enough = time.After(graceTime)
			stop()
		case <-x.cancel:
			if x.why == "" {
				x.why = wire.CommandEndReasonKilled
			}
			stop()
		case <-again:
			again = nil
			if time.Now().Before(until) {
				c.kernel.interrupt()
				again = time.After(askAgain)
			}
		case <-enough:
			// A limit is a limit, whatever the cell makes of being asked.
			c.kernel.kill()
			return c.lose(x, &wire.CommandEnd{
				Reason: wire.CommandEndReasonTimedOut, Signal: "SIGKILL",
				Message: "It ran into its time limit and did not stop when it was asked to; the context is gone.",
			}, "a cell ran into its time limit and did not stop when it was asked to.")
		case <-c.gone:
			c.kernel.kill()
			return c.lose(x, &wire.CommandEnd{Reason: wire.CommandEndReasonKilled, Signal: "SIGKILL", Message: "The context was deleted."}, "it was deleted.")
		}
	}
}

// heed takes a line of the kernel; true: the cell has ended. Lines of another cell, and kinds that we do not know, say
// nothing.
func (c *codeContext) heed(x *cell, m *message) bool {
	held := m.held
	defer func() { c.api.lines.release(held) }()
	if m.dropped {
		if x.waitRoom() != nil {
			x.unsent++
			return false
		}
		x.add(event{ExecutionEvent: status("Something too large to be shown was dropped.")})
		return false
	}
	if m.Count != x.count {
		return false
	}
	switch m.Type {
	case "result", "display":
		if x.waitRoom() != nil {
			x.unsent++
			return false
		}
		c.kernel.drain()
		x.add(event{ExecutionEvent: result(m), held: held})
		held = 0
	case "error":
		x.problem = &wire.ExecutionError{Ename: m.Ename, Evalue: m.Evalue, Traceback: m.Traceback}
		held, x.problemHeld = x.problemHeld, held // of the one before
	case "done":
		return true
	}
	return false
}

// died ends a cell whose kernel has ended.
func (c *codeContext) died(x *cell) string {
	c.kernel.kill() // what it left, or it itself where it only closed its line
	status, known := c.kernel.status()
	end := x.ClassifyStatus(status, known)
	if !known {
		end.Message = "The kernel ended, nobody knows how."
	}
	if x.why != "" {
		end.Reason, end.Message = x.why, "It did not stop when it was asked to, so the kernel was ended; the context is gone."
	}
	return c.lose(x, end, "its kernel ended in a cell ("+command.Describe(end)+").")
}

// finish records the end of a cell and lets the next one in.
func (c *codeContext) finish(x *cell, end *wire.CommandEnd) {
	c.kernel.drain()
	c.mu.Lock()
	c.cell = nil
	c.mu.Unlock()
	// A pump that had seen the cell may still be at it.
	c.kernel.settle()
	x.conclude(end)
}
