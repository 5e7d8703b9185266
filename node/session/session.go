// SPDX-License-Identifier: Apache-2.0

// Package session keeps shells between runs: what one run sets, the next one finds.
package session

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const (
	keepIdle = 64 << 10 // bytes of what jobs write between two runs
	keepPast = 64       // shells that ended and may have left jobs
)

// session is one of the API's.
type session struct {
	api     *API
	id      string
	created time.Time
	gone    chan struct{} // closed when it is deleted
	// program prepares the shell where that is another package's business; nil: as commands are.
	program func(argv []string, cwd string) (*command.Program, error)

	mu      sync.Mutex
	cwd     string
	shell   *shell // nil before the first run and after the shell's end
	lost    string // why the last shell is gone, to be told once
	past    []int  // pids of shells that ended
	run     *run   // the one that is on
	busy    bool
	queue   []chan struct{}
	idle    []byte // what jobs wrote since the last run
	dropped int64  // bytes of it that had no room
}

// enter takes a place in the queue; the channel is closed when it is its turn.
func (s *session) enter() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	turn := make(chan struct{})
	if !s.busy {
		s.busy = true
		close(turn)
		return turn
	}
	s.queue = append(s.queue, turn)
	return turn
}

// leave gives the place up, or the turn on to the next.
func (s *session) leave(turn chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.queue, turn); i >= 0 {
		s.queue = slices.Delete(s.queue, i, i+1)
		return
	}
	if len(s.queue) == 0 {
		s.busy = false
		return
	}
	close(s.queue[0])
	s.queue = s.queue[1:]
}

// run is a command on its way through the shell.
type run struct {
	*command.Foreign
	shell    *shell
	separate bool
	began    spawn.Moment // what is younger came out of it
	answers  <-chan int
	timeout  time.Duration
	cancel   chan struct{}
	once     sync.Once
	ended    chan struct{}
}

// interrupt ends the run: its client left, or somebody asked for its end.
func (r *run) interrupt() { r.once.Do(func() { close(r.cancel) }) }

// prepare makes sure that there is a shell, and gives what a client should know about it.
func (s *session) prepare() (news []string, err error) {
	s.mu.Lock()
	alive := s.shell
	s.mu.Unlock()
	if alive != nil {
		select {
		case <-alive.proc.Done():
			s.bury(alive, "The shell was ended between two runs.")
		default:
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost != "" {
		news = append(news, s.lost+" A new one was started; variables, functions and jobs are gone, the directory is kept.")
		s.lost = ""
	}
	if s.shell == nil {
		if s.shell, err = s.start(); err != nil {
			return nil, err
		}
	}
	if s.dropped > 0 {
		news = append(news, strconv.FormatInt(s.dropped, 10)+" bytes that jobs wrote since the last run were dropped.")
		s.dropped = 0
	}
	return news, nil
}

func (s *session) start() (*shell, error) {
	d := &bash
	if s.api.Runner.Lookup("bash") == "" {
		d = &sh
	}
	if s.program != nil {
		p, err := s.program(d.argv, s.cwd)
		if err != nil {
			return nil, err
		}
		defer p.Close()
		return start(s.api.Spawner, p, d, s.output)
	}
	p, err := s.api.Runner.Program(&wire.RunCommandRequest{Argv: d.argv})
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if p.Spec.Path == "" {
		return nil, os.ErrNotExist
	}
	// A directory that is gone does not make the session unusable.
	if dir, err := safefile.OpenDir(s.cwd); err == nil {
		_ = p.Spec.Dir.Close()
		p.Spec.Dir = dir
	} else {
		s.cwd = p.Cwd
	}
	return start(s.api.Spawner, p, d, s.output)
}

// output gets what the shell and its programs write. Between two runs a little is kept for the next.
func (s *session) output(stream command.Stream, data []byte) {
	s.mu.Lock()
	current := s.run
	if current == nil {
		s.idle = append(s.idle, data...)
		if over := len(s.idle) - keepIdle; over > 0 {
			s.idle = append(s.idle[:0], s.idle[over:]...)
			s.dropped += int64(over)
		}
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	if !current.separate {
		stream = command.Stdout
	}
	// Not under the lock, because a slow disk or reader may hold it up. The run cannot end meanwhile: before it does,
	// it drains, for which it needs the lock that the pump holds now.
	current.write(stream, data)
}

// begin hands a command to the shell; prepare has been called.
func (s *session) begin(f *command.Foreign, cwd string, body *wire.RunInSessionRequest) *run {
	s.mu.Lock()
	r := &run{
		Foreign: f, shell: s.shell, separate: body.Separate, began: spawn.Now(s.shell.proc.Pid),
		cancel: make(chan struct{}), ended: make(chan struct{}),
	}
	if body.Timeout != nil {
		r.timeout = time.Duration(*body.Timeout) * time.Millisecond
	}
	if len(s.idle) > 0 {
		f.Write(command.Stdout, s.idle)
		s.idle = nil
	}
	s.run = r
	if cwd != "" {
		s.cwd = cwd
	}
	s.mu.Unlock()
	var err error
	if r.answers, err = r.shell.send(cwd, body.Command, body.Separate); err != nil {
		s.api.Log.Error("handing a command to the shell", "session", s.id, "error", err)
		s.kill(r.shell)
	}
	f.Interruptible(r.interrupt)
	go s.watch(r)
	return r
}

func (r *run) write(stream command.Stream, data []byte) { r.Foreign.Write(stream, data) }

// watch waits for the end of a run and records it.
func (s *session) watch(r *run) {
	defer close(r.ended)
	var expired <-chan time.Time
	if r.timeout > 0 {
		timer := time.NewTimer(r.timeout)
		defer timer.Stop()
		expired = timer.C
	}
	var end *wire.CommandEnd
	var lost string
	select {
	case code := <-r.answers:
		end = exited(code)
	case <-r.shell.proc.Done():
		// Its answer may have come first and both be there.
		select {
		case code := <-r.answers:
			end = exited(code)
		default:
			end = r.Classify(r.shell.proc)
		}
		lost = "The shell ended in the run before."
	case <-expired:
		end, lost = s.stop(r, wire.CommandEndReasonTimedOut, "It ran into its time limit.")
	case <-r.cancel:
		end, lost = s.stop(r, wire.CommandEndReasonKilled, "It was interrupted.")
	case <-s.gone:
		end = &wire.CommandEnd{Reason: wire.CommandEndReasonKilled, Signal: "SIGKILL", Message: "The session was deleted."}
		s.kill(r.shell)
	}
	r.shell.drain()
	r.shell.forget()
	s.mu.Lock()
	if dir, err := os.Readlink("/proc/" + strconv.Itoa(r.shell.proc.Pid) + "/cwd"); err == nil && strings.HasPrefix(dir, "/") {
		s.cwd = dir
	}
	s.run = nil
	s.mu.Unlock()
	// A pump that had seen the run may still be at it.
	for _, p := range r.shell.pumps {
		p.Settle()
	}
	if lost != "" {
		s.bury(r.shell, lost)
		if end.Message == "" {
			end.Message = "It ended the session's shell; the next run starts a new one."
		}
	}
	r.Finish(end)
}

func exited(code int) *wire.CommandEnd {
	return &wire.CommandEnd{Reason: wire.CommandEndReasonExited, ExitCode: &code}
}

// stop ends what a run has started and lets the shell skip the rest. Where that does not help the shell has to go.
func (s *session) stop(r *run, reason wire.CommandEndReason, message string) (end *wire.CommandEnd, lost string) {
	end = &wire.CommandEnd{Reason: reason, Signal: "SIGKILL", Message: message}
	if r.shell.interrupt(r.began, r.answers, s.gone) {
		return end, ""
	}
	s.kill(r.shell)
	return end, "The shell had to be killed, because its run did not stop otherwise."
}

// kill ends a shell and all that came out of it.
func (s *session) kill(sh *shell) {
	tree := sh.proc.Tree()
	defer tree.Close()
	select {
	case <-sh.proc.Done():
		return // the number may be somebody else's; bury has noted it
	default:
	}
	tree.Kill()
	_ = sh.proc.SignalGroup(9)
	<-sh.proc.Done()
}

// bury forgets a shell that has ended. What it left running goes on, without a reader for its output.
func (s *session) bury(sh *shell, why string) {
	sh.drain()
	sh.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shell == sh {
		s.shell, s.lost = nil, why
		s.past = append(s.past, sh.proc.Pid)
		if len(s.past) > keepPast {
			s.past = s.past[1:]
		}
	}
}

// end deletes the session: its run, its shell, its jobs.
func (s *session) end() {
	close(s.gone)
	turn := s.enter()
	defer s.leave(turn)
	<-turn
	s.mu.Lock()
	sh := s.shell
	s.mu.Unlock()
	if sh != nil {
		s.kill(sh)
		s.bury(sh, "")
	}
	s.mu.Lock()
	past := s.past
	s.past = nil
	s.mu.Unlock()
	var counts map[int]int
	for _, pid := range past {
		// While jobs are left the number of their session is not given away. Where a process bears it, none is left.
		if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); err == nil {
			continue
		}
		if counts == nil {
			counts = spawn.Sessions()
		}
		if counts[pid] > 0 {
			tree := spawn.NewTree(pid)
			tree.Kill()
			tree.Close()
		}
	}
}

func (s *session) info() wire.SessionInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return wire.SessionInfo{SessionID: s.id, Cwd: s.cwd, CreatedAt: s.created, Running: s.run != nil}
}

// directory resolves the cwd of a run: relative to where the session is.
func (s *session) directory(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	if !strings.ContainsAny(path[:1], "/~$") {
		s.mu.Lock()
		path = s.cwd + "/" + path
		s.mu.Unlock()
	}
	path, err := s.api.Runner.Path(path)
	if err != nil {
		return "", err
	}
	dir, err := safefile.OpenDir(path)
	if err != nil {
		return "", reply.Errorf(wire.CodeInvalidRequestBody, "The working directory cannot be used: %s: %v", path, err).
			WithHint("Create it first, or leave cwd out.")
	}
	_ = dir.Close()
	return path, nil
}

func notFound(id string) error {
	return reply.Errorf(wire.CodeContextNotFound, "There is no session %q.", shorten(id)).WithHint("GET /sessions lists those that exist.")
}

func shorten(text string) string {
	if len(text) > 64 {
		return fmt.Sprintf("%s…", strings.ToValidUTF8(text[:64], "?"))
	}
	return text
}
