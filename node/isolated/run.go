// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

const (
	cursorKey   = "EXECD-ISOLATED-TAIL-CURSOR"
	logMax      = 16 << 20 // bytes in one answer
	timeoutMax  = 366 * 24 * time.Hour
	runningMax  = 32
	finishedMax = 128
)

// background is a run that nobody waits for.
type background struct {
	*command.Foreign
	finished chan struct{}
}

func (s *isolate) serveRun(w http.ResponseWriter, r *http.Request) error {
	var body wire.IsolatedRunRequest
	if err := reply.Decode(w, r, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		return err
	}
	if err := checkRun(&body); err != nil {
		return err
	}
	if err := s.begin(); err != nil {
		return err
	}
	if body.Background {
		id, run, err := s.start(r, &body)
		if err != nil {
			s.done()
			return err
		}
		reply.JSON(w, http.StatusAccepted, wire.IsolatedRun{SessionID: s.id, RunID: id, StartedAt: run.Record().StartedAt})
		return nil
	}
	defer s.done()
	text := body.Code
	if len(body.Envs) > 0 {
		text = exports(body.Envs) + text
	}
	request := &wire.RunInSessionRequest{Command: text, Separate: true}
	if t := body.TimeoutSeconds; t != nil && *t > 0 {
		ms := *t * 1000
		request.Timeout = &ms
	}
	s.shell.Serve(w, r, request)
	return nil
}

func checkRun(body *wire.IsolatedRunRequest) error {
	switch {
	case body.Code == "":
		return invalid("code is empty.")
	case strings.IndexByte(body.Code, 0) >= 0:
		return invalid("code holds a NUL byte.")
	case body.TimeoutSeconds != nil && (*body.TimeoutSeconds < 0 || *body.TimeoutSeconds > int64(timeoutMax/time.Second)):
		return invalid("timeout_seconds must lie between 0 and %d.", int64(timeoutMax/time.Second))
	}
	for name, value := range body.Envs {
		if !isName(name) || strings.IndexByte(value, 0) >= 0 {
			return invalid("envs: %.64q is not a variable that a shell can export.", name)
		}
	}
	return nil
}

func isName(name string) bool {
	for i, c := range []byte(name) {
		if c != '_' && (c|0x20 < 'a' || c|0x20 > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}

// exports is code that sets variables, before other code on the same line: errors name the lines of the caller's.
func exports(envs map[string]string) string {
	var out strings.Builder
	for name, value := range envs {
		out.WriteString("export " + name + "='" + strings.ReplaceAll(value, "'", `'\''`) + "'; ")
	}
	return out.String()
}

// start runs code in the background, in a shell of its own that begins where the session's is.
func (s *isolate) start(r *http.Request, body *wire.IsolatedRunRequest) (string, *background, error) {
	s.mu.Lock()
	running := 0
	for _, b := range s.runs {
		if b.Record().End == nil {
			running++
		}
	}
	s.mu.Unlock()
	if running >= runningMax {
		return "", nil, reply.Errorf(wire.CodeResourceExhausted, "%d runs of the session are in the background, more are not possible.", runningMax)
	}
	shell := "bash"
	if s.api.Runner.Lookup(shell) == "" {
		shell = "sh"
	}
	p, err := s.program([]string{shell, "-c", body.Code}, s.shell.Cwd())
	if err != nil {
		return "", nil, err
	}
	defer p.Close()
	for name, value := range body.Envs {
		p.Spec.Env = append(p.Spec.Env, name+"="+value)
	}
	ours, theirs, err := command.NewPipe(true)
	if err != nil {
		return "", nil, err
	}
	defer theirs.Close()
	p.Spec.Stdout, p.Spec.Stderr = theirs, theirs
	f, err := s.api.Runner.Begin(body.Code, p.Cwd, r)
	if err != nil {
		_ = ours.Close()
		return "", nil, err
	}
	proc, err := s.api.Spawner.Start(p.Spec)
	if err != nil {
		_ = ours.Close()
		end := command.StartFailed(shell, err)
		f.Finish(end)
		return "", nil, reply.Errorf(wire.CodeRuntimeError, "The run cannot be started: %s", end.Message)
	}
	b := &background{f, make(chan struct{})}
	f.Interruptible(func() { go killTree(proc) })
	go s.watch(b, proc, &command.Pump{File: ours, Stream: command.Stdout, Sink: f.Write})
	return s.remember(b), b, nil
}

func killTree(proc *spawn.Process) {
	tree := proc.Tree()
	defer tree.Close()
	select {
	case <-proc.Done():
	default:
		tree.Kill()
	}
}

// watch waits for the end of a run in the background.
func (s *isolate) watch(b *background, proc *spawn.Process, out *command.Pump) {
	defer s.done()
	defer close(b.finished)
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		out.Run()
	}()
	<-proc.Done()
	// What it left running may go on, but nobody listens to it.
	out.Drain()
	_ = out.File.Close()
	<-moved
	b.Finish(b.Classify(proc))
}

// remember gives a run its id.
func (s *isolate) remember(b *background) string {
	id := newID()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.runs == nil {
		s.runs = map[string]*background{}
	}
	s.runs[id] = b
	s.order = append(s.order, id)
	for i := 0; len(s.order) > finishedMax && i < len(s.order); {
		old := s.order[i]
		if s.runs[old].Record().End == nil {
			i++
			continue
		}
		delete(s.runs, old)
		s.order = slices.Delete(s.order, i, i+1)
	}
	return id
}

func (s *isolate) run(r *http.Request) (string, *background, error) {
	id := r.PathValue("run_id")
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.runs[id]; b != nil {
		return id, b, nil
	}
	return id, nil, reply.Errorf(wire.CodeCommandNotFound, "The session has no run %.64q in the background.", id).
		WithHint("The id is in the answer to a run with background: true; the last %d are remembered.", finishedMax)
}

func (s *isolate) serveStatus(w http.ResponseWriter, r *http.Request) error {
	id, b, err := s.run(r)
	if err != nil {
		return err
	}
	record := b.Record()
	answer := wire.IsolatedRunStatus{SessionID: s.id, RunID: id, Running: record.End == nil, StartedAt: record.StartedAt}
	if end := record.End; end != nil {
		if record.FinishedAt != nil {
			answer.FinishedAt = *record.FinishedAt
		}
		answer.ExitCode = end.ExitCode
		if end.ExitCode == nil {
			answer.Error = strings.TrimSpace(string(end.Reason) + " " + end.Signal + " " + end.Message)
		}
	}
	reply.JSON(w, http.StatusOK, answer)
	return nil
}

func (s *isolate) serveLogs(w http.ResponseWriter, r *http.Request) error {
	_, b, err := s.run(r)
	if err != nil {
		return err
	}
	b.ServeLog(w, r, cursorKey, logMax)
	return nil
}
