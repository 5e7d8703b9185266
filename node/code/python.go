// SPDX-License-Identifier: Apache-2.0

package code

import (
	"bufio"
	_ "embed" // for the kernel
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

//go:embed kernel/python.py
var pythonKernel string

const (
	warmTime   = 30 * time.Second // for an interpreter to start, on a machine that is busy
	complaints = 4 << 10          // what is kept of what a warm parent writes
	packetMax  = 4 << 10
)

// forkTime is what a parent has to answer. Tests shorten it.
var forkTime = 15 * time.Second

// python keeps the warm parent.
type python struct {
	mu     sync.Mutex // held while one is started
	parent *warmParent
	closed bool
}

// warm gives the parent, started if there is none.
func (p *python) warm(a *API) (*warmParent, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ending()
	}
	if p.parent != nil {
		select {
		case <-p.parent.proc.Done():
			p.parent.close()
			p.parent = nil
		default:
			return p.parent, nil
		}
	}
	parent, err := a.startParent()
	if err != nil {
		return nil, err
	}
	p.parent = parent
	return parent, nil
}

// drop ends a parent that does not do what it should.
func (p *python) drop(parent *warmParent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.parent == parent {
		p.parent = nil
		parent.close()
	}
}

func (p *python) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.parent != nil {
		p.parent.close()
		p.parent = nil
	}
}

// warmParent is the process that contexts are forked from. It runs nothing but the kernel's own code.
type warmParent struct {
	proc    *spawn.Process
	conn    *net.UnixConn
	pump    *command.Pump
	readers sync.WaitGroup
	ready   chan struct{}

	mu     sync.Mutex
	forks  uint32
	births map[string]chan birth    // who waits to be forked
	deaths map[string]chan<- uint32 // who waits for the status of a context
	said   []byte
}

// birth is the answer to a wish for a context.
type birth struct {
	pid    int
	reason string
}

func (a *API) startParent() (*warmParent, error) {
	program, err := a.interpreter()
	if err != nil {
		return nil, err
	}
	defer program.Close()
	fd, err := unix.MemfdCreate("kernel", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	source := os.NewFile(uintptr(fd), "kernel")
	defer source.Close()
	if _, err := source.WriteString(pythonKernel); err != nil {
		return nil, err
	}
	if _, err := source.Seek(0, 0); err != nil {
		return nil, err
	}
	// Others of the user can open it, through /proc/PID/fd.
	if _, err := unix.FcntlInt(source.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK); err != nil {
		return nil, err
	}
	conn, theirs, err := socketPair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	ours, pipe, err := command.NewPipe(true)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	defer pipe.Close()
	w := &warmParent{conn: conn, ready: make(chan struct{}), births: map[string]chan birth{}, deaths: map[string]chan<- uint32{}}
	w.pump = &command.Pump{File: ours, Sink: w.hear}
	spec := program.Spec
	spec.Stdin, spec.Stdout, spec.Stderr, spec.Extra = source, pipe, pipe, []*os.File{theirs}
	if w.proc, err = a.Spawner.Start(spec); err != nil {
		_, _ = conn.Close(), ours.Close()
		return nil, err
	}
	w.readers.Go(w.pump.Run)
	w.readers.Go(w.listen)
	timer := time.NewTimer(warmTime)
	defer timer.Stop()
	select {
	case <-w.ready:
		return w, nil
	case <-w.proc.Done():
		w.pump.Drain()
		err = fmt.Errorf("the interpreter ended at once: %s", w.lastWords())
	case <-timer.C:
		err = fmt.Errorf("the interpreter is not ready after %s", warmTime)
	}
	w.close()
	return nil, err
}

// interpreter is the sandbox's Python: the version that PYTHON_VERSION names, where there is one, else python3.
func (a *API) interpreter() (*command.Program, error) {
	names := []string{"python3", "python"}
	for _, pair := range a.Runner.Env {
		if version, ok := strings.CutPrefix(pair, "PYTHON_VERSION="); ok && version != "" && strings.Trim(version, "0123456789.") == "" {
			names = append([]string{"python" + version}, names...)
			if parts := strings.Split(version, "."); len(parts) > 2 {
				names = append([]string{"python" + parts[0] + "." + parts[1]}, names...)
			}
		}
	}
	for _, name := range names {
		if path := a.Runner.Lookup(name); path != "" {
			// Isolated, so that no file of the user's stands for a module: neither in the directory nor where PYTHONPATH
			// points, nor among the user's packages. The words are for ps.
			return a.Runner.Program(&wire.RunCommandRequest{Argv: []string{path, "-I", "-", "opensandbox", "kernel"}, Cwd: "/"})
		}
	}
	return nil, os.ErrNotExist
}

// hear keeps the end of what the parent writes: it is silent unless something is wrong with it.
func (w *warmParent) hear(_ command.Stream, data []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, data...)
	if over := len(w.said) - complaints; over > 0 {
		w.said = append(w.said[:0], w.said[over:]...)
	}
}

func (w *warmParent) lastWords() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(strings.ToValidUTF8(string(w.said), "?")), "\n")
	return lines[len(lines)-1]
}

// listen reads the parent's answers. Ids that nobody waits for say nothing.
func (w *warmParent) listen() {
	buf := make([]byte, packetMax)
	isReady := false
	for {
		n, err := w.conn.Read(buf)
		if err != nil || n == 0 {
			return
		}
		var answer struct {
			Type   string `json:"type"`
			ID     string `json:"id"`
			Pid    int    `json:"pid"`
			Reason string `json:"reason"`
			Status uint32 `json:"status"`
		}
		if json.Unmarshal(buf[:n], &answer) != nil {
			continue
		}
		w.mu.Lock()
		switch answer.Type {
		case "ready":
			if !isReady {
				isReady = true
				close(w.ready)
			}
		case "forked", "refused":
			if waits := w.births[answer.ID]; waits != nil {
				delete(w.births, answer.ID)
				waits <- birth{answer.Pid, answer.Reason}
			}
		case "ended":
			if waits := w.deaths[answer.ID]; waits != nil {
				delete(w.deaths, answer.ID)
				waits <- answer.Status
			}
		}
		w.mu.Unlock()
	}
}

// fork asks for a context; status gets how it ends.
func (w *warmParent) fork(id string, files []*os.File, status chan<- uint32) (int, error) {
	packet, err := json.Marshal(map[string]string{"op": "context", "id": id})
	if err != nil {
		return 0, err
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	waits := make(chan birth, 1)
	w.mu.Lock()
	w.births[id], w.deaths[id] = waits, status
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.births, id)
		w.mu.Unlock()
	}()
	_ = w.conn.SetWriteDeadline(time.Now().Add(forkTime))
	if _, _, err := w.conn.WriteMsgUnix(packet, unix.UnixRights(fds...), nil); err != nil {
		return 0, err
	}
	timer := time.NewTimer(forkTime)
	defer timer.Stop()
	select {
	case b := <-waits:
		if b.pid == 0 {
			return 0, reply.Errorf(wire.CodeResourceExhausted, "The sandbox cannot have another process: %s.", shorten(b.reason)).
				WithHint("End something that runs in it, and try again.")
		}
		return b.pid, nil
	case <-w.proc.Done():
		return 0, errors.New("the kernel's parent has ended")
	case <-timer.C:
		return 0, errors.New("the kernel's parent does not answer")
	}
}

// close ends the parent; contexts live on.
func (w *warmParent) close() {
	_ = w.proc.Signal(unix.SIGKILL)
	<-w.proc.Done()
	_, _ = w.conn.Close(), w.pump.File.Close()
	w.readers.Wait()
}

// pythonContext is the kernel of one context.
type pythonContext struct {
	fork     *spawn.Fork
	conn     *net.UnixConn
	pumps    []*command.Pump
	said     chan message
	stop     chan struct{}
	statuses chan uint32
	readers  sync.WaitGroup

	mu    sync.Mutex
	began spawn.Moment
}

func (a *API) startPython(c *codeContext, cwd string, envs map[string]string) (kernel, string, error) {
	// What a command would get now: directory, environment.
	program, err := a.Runner.Program(&wire.RunCommandRequest{Argv: []string{"python3"}, Cwd: cwd, Envs: envs})
	if err != nil {
		return nil, "", err
	}
	defer program.Close()
	// A parent that died, or was stopped by a cell, is replaced; once.
	for try := 0; ; try++ {
		parent, err := a.python.warm(a)
		if err != nil {
			return nil, "", err
		}
		k, err := a.forkPython(parent, c, program)
		if err == nil {
			return k, program.Cwd, nil
		}
		var fault *reply.Fault
		if errors.As(err, &fault) || try > 0 {
			return nil, "", err
		}
		a.Log.Warn("forking a code context", "error", err)
		a.python.drop(parent)
	}
}

func (a *API) forkPython(parent *warmParent, c *codeContext, program *command.Program) (*pythonContext, error) {
	k := &pythonContext{said: make(chan message), stop: make(chan struct{}), statuses: make(chan uint32, 1)}
	conn, theirs, err := socketPair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	k.conn = conn
	files := []*os.File{theirs}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for stream := range 2 {
		ours, pipe, err := command.NewPipe(true)
		if err != nil {
			k.abandon()
			return nil, err
		}
		k.pumps = append(k.pumps, &command.Pump{File: ours, Stream: command.Stream(stream), Sink: c.output})
		files = append(files, pipe)
	}
	parent.mu.Lock()
	parent.forks++
	mark := parent.proc.MarkBelow(parent.forks)
	parent.mu.Unlock()
	pid, err := parent.fork(c.id, append(files[:3:3], program.Spec.Dir), k.statuses)
	if err == nil {
		k.fork, err = parent.proc.Fork(pid, mark)
	}
	if err != nil {
		k.abandon()
		return nil, err
	}
	env := map[string]string{}
	for _, pair := range program.Spec.Env {
		if name, value, ok := strings.Cut(pair, "="); ok {
			env[name] = value
		}
	}
	for _, p := range k.pumps {
		k.readers.Go(p.Run)
	}
	k.readers.Go(func() { k.listen(&a.lines) })
	if err := k.tell(map[string]any{"op": "begin", "env": env, "mark": mark}); err != nil {
		k.kill()
		k.close()
		return nil, err
	}
	return k, nil
}

// abandon gives back what a context that never was has taken.
func (k *pythonContext) abandon() {
	_ = k.conn.Close()
	for _, p := range k.pumps {
		_ = p.File.Close()
	}
}

// listen reads the context's lines until it closes its end.
func (k *pythonContext) listen(b *budget) {
	defer close(k.said)
	in := &lineReader{conn: k.conn, in: bufio.NewReaderSize(k.conn, 4<<10), budget: b, stop: k.stop}
	for {
		line, held, err := in.next()
		if err != nil && !errors.Is(err, errDropped) {
			return
		}
		var m message
		if err == nil {
			m, err = parse(line)
		}
		if err == nil && held == 0 && m.waits() {
			// From here on a short one counts too: nobody knows how long it will wait.
			if held = int64(len(line)) + eventCost; !b.reserve(held, time.Now().Add(lineTime), k.stop) {
				held, err = 0, errDropped
			}
		}
		switch {
		case errors.Is(err, errDropped), errors.Is(err, errTooMany):
			b.release(held)
			m, held = message{dropped: true}, 0
		case err != nil:
			b.release(held)
			continue
		}
		m.held = held
		select {
		case k.said <- m:
		case <-k.stop:
			b.release(held)
			return
		}
	}
}

func (k *pythonContext) tell(line any) error {
	data, err := json.Marshal(line)
	if err != nil {
		return err
	}
	_ = k.conn.SetWriteDeadline(time.Now().Add(forkTime))
	_, err = k.conn.Write(append(data, '\n'))
	return err
}

func (k *pythonContext) start(count int, code string, envs map[string]string) error {
	k.mu.Lock()
	k.began = spawn.Now(k.fork.Pid)
	k.mu.Unlock()
	return k.tell(map[string]any{"op": "run", "count": count, "code": code, "env": envs})
}

// interrupt is Ctrl-C: for the interpreter, and for the programs that this cell has started; those of earlier cells go
// on.
func (k *pythonContext) interrupt() {
	k.mu.Lock()
	began := k.began
	k.mu.Unlock()
	tree := k.fork.Tree()
	defer tree.Close()
	tree.InterruptSince(began)
}

func (k *pythonContext) lines() <-chan message  { return k.said }
func (k *pythonContext) ended() <-chan struct{} { return k.fork.Done() }
func (k *pythonContext) pid() int               { return k.fork.Pid }

func (k *pythonContext) drain() {
	for _, p := range k.pumps {
		p.Drain()
	}
}

func (k *pythonContext) settle() {
	for _, p := range k.pumps {
		p.Settle()
	}
}

// status is what the parent has collected. It comes a moment after the end, or never where the parent has ended too.
func (k *pythonContext) status() (syscall.WaitStatus, bool) {
	select {
	case <-k.fork.Done():
	default:
		return 0, false
	}
	timer := time.NewTimer(lastWords)
	defer timer.Stop()
	select {
	case s := <-k.statuses:
		k.statuses <- s // for who asks again
		return syscall.WaitStatus(s), true
	case <-timer.C:
		return 0, false
	}
}

func (k *pythonContext) kill() {
	tree := k.fork.Tree()
	defer tree.Close()
	tree.Kill()
	_ = k.fork.Signal(unix.SIGKILL) // also where /proc could not be read
	<-k.fork.Done()
}

func (k *pythonContext) close() {
	close(k.stop)
	k.abandon()
	k.readers.Wait()
	k.fork.Close()
}

// socketPair makes a pair of sockets; ours is for the runtime's poller, theirs blocks, as programs expect.
func socketPair(kind int) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "kernel"), os.NewFile(uintptr(fds[1]), "kernel")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		_, _ = conn.Close(), theirs.Close()
		return nil, nil, errors.New("not a Unix socket")
	}
	return unixConn, theirs, nil
}
