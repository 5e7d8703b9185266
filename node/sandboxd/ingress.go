// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wipe"
	"opensandbox.io/node/wire"
)

// firstPort is where ingress listens unless that is taken; so many more are tried.
const (
	firstPort  = 28888
	portsTried = 100
)

// ingress supervises the program that serves clients. sandboxd binds the listeners and never lets go of them, so
// that a crash of the program costs its connections but no new ones.
type ingress struct {
	program string
	runDir  string
	kept    string // file with the port, so that endpoints survive a restart
	logFile string
	level   string
	// id is the user and group it runs as; 0 keeps sandboxd's (rootless).
	id  int
	log *slog.Logger

	// setting lets one request at a time bind.
	setting sync.Mutex

	mu sync.Mutex
	// wanted is what was asked for last; listeners are those of it that could be had.
	wanted    []string
	port      int
	listeners []listener
	process   *os.Process
	// changed tells that process, held or stopped has changed.
	changed *sync.Cond
	// held keeps the program from being started while listeners are exchanged.
	held    bool
	stopped bool
	done    chan struct{}
}

// listener is one open socket of ingress.
type listener struct {
	host string
	port int
	file *os.File
}

// A program that ends within a second of its start, several times in a row, is broken: from then on there is a pause
// between two starts, which grows from the shortest to the longest. Before that nobody who connects shall wait.
const (
	quickLife  = time.Second
	quickEnds  = 5
	shortPause = 50 * time.Millisecond
	longPause  = 5 * time.Second
)

func (d *Daemon) putIngress(w http.ResponseWriter, r *http.Request) error {
	var request wire.IngressRequest
	if err := reply.Decode(w, r, &request, maxRequest, wire.CodeSandboxInvalidParameter); err != nil {
		return err
	}
	if len(request.Hosts) == 0 || len(request.Hosts) > 16 {
		return invalid("hosts must name between 1 and 16 addresses.")
	}
	for _, host := range request.Hosts {
		if net.ParseIP(host) == nil {
			return invalid("hosts must be IP addresses; %q is not.", short(host))
		}
	}
	port := 0
	if request.Port != nil {
		port = *request.Port
	}
	if port < 0 || port > 65535 {
		return invalid("port must lie between 0 and 65535.")
	}
	answer, err := d.ingress.set(request.Hosts, port)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, answer)
	return nil
}

// set starts it, or has it listen elsewhere if something else is asked for than the last time, and says where it is.
func (i *ingress) set(hosts []string, port int) (wire.Ingress, error) {
	i.setting.Lock()
	defer i.setting.Unlock()
	i.mu.Lock()
	running := i.listeners != nil
	same := sameHosts(hosts, i.wanted) && (port == 0 || port == i.port)
	i.mu.Unlock()
	var err error
	switch {
	case !running:
		err = i.start(hosts, port)
	case !same:
		err = i.rebind(hosts, port)
	}
	if err != nil {
		return wire.Ingress{}, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for i.process == nil && !i.stopped {
		i.changed.Wait()
	}
	if i.process == nil {
		return wire.Ingress{}, reply.Errorf(wire.CodeNodeUnavailable, "ingress is stopping.")
	}
	answer := wire.Ingress{Port: i.port, PID: i.process.Pid}
	for _, l := range i.listeners {
		answer.Hosts = append(answer.Hosts, l.host)
	}
	return answer, nil
}

func sameHosts(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

func (i *ingress) start(hosts []string, port int) error {
	program, err := openProgram(i.program)
	if err != nil {
		return reply.Errorf(wire.CodeNodeUnsupportedHost, "ingress cannot be started: %v.", err)
	}
	listeners, err := i.bind(hosts, i.candidates(port), nil)
	if err != nil {
		program.Close()
		return cannotListen(err)
	}
	i.mu.Lock()
	i.done = make(chan struct{})
	i.mu.Unlock()
	i.take(hosts, listeners)
	go i.supervise(program)
	return nil
}

func cannotListen(err error) error {
	return reply.Errorf(wire.CodeNodeUnavailable, "ingress cannot listen: %v.", err).
		WithHint("Give another port, or stop what holds it.")
}

// rebind exchanges the listeners. Open connections end, because the program that holds them does; those that wait on
// a listener that stays are served by its successor. If it cannot be done, everything stays as it was.
func (i *ingress) rebind(hosts []string, port int) error {
	i.mu.Lock()
	old, oldPort := i.listeners, i.port
	i.mu.Unlock()
	if port != 0 && port != oldPort {
		// Another port: what is open now is not in the way.
		listeners, err := i.bind(hosts, i.candidates(port), nil)
		if err != nil {
			return cannotListen(err)
		}
		i.hold()
		i.take(hosts, listeners)
		closeAll(old)
		i.release()
		return nil
	}
	// The same port: 127.0.0.1 is in the way of 0.0.0.0, so that the old ones go first.
	i.hold()
	defer i.release()
	var kept, dropped []listener
	for _, l := range old {
		if slices.Contains(hosts, l.host) {
			kept = append(kept, l)
		} else {
			dropped = append(dropped, l)
		}
	}
	closeAll(dropped)
	here := []candidate{{oldPort, patience}}
	listeners, err := i.bind(hosts, here, kept)
	if err == nil {
		i.take(hosts, listeners)
		return nil
	}
	var oldHosts []string
	for _, l := range old {
		oldHosts = append(oldHosts, l.host)
	}
	if back, again := i.bind(oldHosts, here, kept); again == nil {
		i.mu.Lock()
		i.listeners = back
		i.mu.Unlock()
	} else {
		i.log.Error("ingress lost its listeners", "error", again)
	}
	return cannotListen(err)
}

// take makes these the listeners of the next program that is started.
func (i *ingress) take(hosts []string, listeners []listener) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.wanted, i.port, i.listeners = hosts, listeners[0].port, listeners
	text := fmt.Appendf(nil, "{\"port\":%d}\n", i.port)
	if err := os.WriteFile(i.kept, text, 0o644); err != nil {
		i.log.Warn("the port of ingress is not kept", "error", err)
	}
}

// hold ends the program and keeps it from being started again until release.
func (i *ingress) hold() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.held = true
	if i.process != nil {
		i.process.Kill()
	}
	for i.process != nil {
		i.changed.Wait()
	}
}

func (i *ingress) release() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.held = false
	i.changed.Broadcast()
}

func closeAll(listeners []listener) {
	for _, l := range listeners {
		l.file.Close()
	}
}

// bind listens on the first port on which the first host can be had, and there on the other hosts that can. What is
// open already is taken over.
func (i *ingress) bind(hosts []string, candidates []candidate, open []listener) ([]listener, error) {
	var failed error
	for _, candidate := range candidates {
		first, err := openListener(hosts[0], candidate.port, candidate.patience, open)
		if err != nil {
			failed = err
			continue
		}
		listeners := []listener{first}
		for _, host := range hosts[1:] {
			l, err := openListener(host, first.port, 0, open)
			if err != nil {
				i.log.Warn("ingress does not listen everywhere", "host", host, "error", err)
				continue
			}
			listeners = append(listeners, l)
		}
		return listeners, nil
	}
	return nil, failed
}

func openListener(host string, port int, patience time.Duration, open []listener) (listener, error) {
	for _, l := range open {
		if l.host == host && l.port == port {
			return l, nil
		}
	}
	file, err := listen(host, port, patience)
	if err != nil {
		return listener{}, err
	}
	if port == 0 {
		port = portOf(file)
	}
	return listener{host, port, file}, nil
}

type candidate struct {
	port     int
	patience time.Duration
}

// patience is for a predecessor that was killed: it takes its ingress with it, but not in the same instant.
const patience = 2 * time.Second

func (i *ingress) candidates(port int) []candidate {
	if port != 0 {
		return []candidate{{port, patience}}
	}
	var list []candidate
	var kept struct{ Port int }
	if text, err := os.ReadFile(i.kept); err == nil && json.Unmarshal(text, &kept) == nil && kept.Port > 0 && kept.Port < 65536 {
		list = append(list, candidate{kept.Port, patience})
	}
	for n := range portsTried {
		list = append(list, candidate{port: firstPort + n})
	}
	return append(list, candidate{})
}

func listen(host string, port int, patience time.Duration) (*os.File, error) {
	deadline := time.Now().Add(patience)
	for {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			defer l.Close()
			return l.(*net.TCPListener).File()
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return nil, err
		}
		time.Sleep(20 * time.Millisecond) // the kernel has no event for a port that becomes free
	}
}

func portOf(f *os.File) int {
	address, err := unix.Getsockname(int(f.Fd()))
	if err != nil {
		return 0
	}
	switch a := address.(type) {
	case *unix.SockaddrInet4:
		return a.Port
	case *unix.SockaddrInet6:
		return a.Port
	}
	return 0
}

// supervise runs the program until stop, again and again if need be.
func (i *ingress) supervise(program *os.File) {
	// The child's death signal is tied to the thread that forks it: this one stays until sandboxd is gone.
	runtime.LockOSThread()
	defer close(i.done)
	defer program.Close()
	pause, quick := shortPause, 0
	for {
		listeners, ok := i.turn()
		if !ok {
			return
		}
		began := time.Now()
		process, err := i.spawn(program, listeners)
		if err == nil {
			i.watch(process)
		} else {
			i.log.Error("ingress does not start", "error", err)
		}
		if time.Since(began) > quickLife {
			pause, quick = shortPause, 0
			continue
		}
		if quick++; quick > quickEnds {
			time.Sleep(pause)
			pause = min(2*pause, longPause)
		}
	}
}

// turn waits until the program may be started; not ok when it is not to be started any more.
func (i *ingress) turn() ([]listener, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for i.held && !i.stopped {
		i.changed.Wait()
	}
	return i.listeners, !i.stopped
}

// watch makes the process known and waits for its end.
func (i *ingress) watch(process *os.Process) {
	i.mu.Lock()
	if i.held || i.stopped {
		process.Kill() // decided while it was being started
	}
	i.process = process
	i.changed.Broadcast()
	i.mu.Unlock()
	state, _ := process.Wait()
	i.mu.Lock()
	i.process = nil
	expected := i.held || i.stopped
	i.changed.Broadcast()
	i.mu.Unlock()
	if !expected {
		i.log.Error("ingress ended; starting it again", "state", fmt.Sprint(state))
	}
}

func (i *ingress) spawn(program *os.File, listeners []listener) (*os.Process, error) {
	log, err := os.OpenFile(i.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	args := []string{"ingress", "--run-dir", i.runDir, "--ended-dir", endedDir, "--log-level", i.level}
	files := []*os.File{null, log, log}
	for n, l := range listeners {
		args = append(args, "--listen-fd", strconv.Itoa(3+n))
		files = append(files, l.file)
	}
	sys := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if i.id != 0 {
		sys.Credential = &syscall.Credential{Uid: uint32(i.id), Gid: uint32(i.id)}
	}
	// Through the open file: it runs as a user who may not reach the directory the program lies in.
	return os.StartProcess("/proc/self/fd/"+strconv.Itoa(int(program.Fd())), args, &os.ProcAttr{Dir: "/", Env: []string{}, Files: files, Sys: sys})
}

// openProgram opens an executable at a number that no listener of a child can take.
func openProgram(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 100)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(high), path), nil
}

// stop ends it for good.
func (i *ingress) stop() {
	i.mu.Lock()
	i.stopped = true
	i.changed.Broadcast()
	process, done := i.process, i.done
	i.mu.Unlock()
	defer wipe.Tree(filepath.Join(i.runDir, endedDir))
	if done == nil {
		return
	}
	if process != nil {
		process.Kill()
	}
	<-done
	closeAll(i.listeners)
}

func newIngress(config *Config, runDir string, id int, log *slog.Logger) *ingress {
	i := &ingress{
		program: config.Ingress, runDir: runDir, id: id, log: log, level: config.LogLevel,
		kept:    filepath.Join(config.StateDir, "ingress.json"),
		logFile: filepath.Join(config.StateDir, "log", "ingress.log"),
	}
	i.changed = sync.NewCond(&i.mu)
	if i.program == "" {
		if self, err := os.Readlink("/proc/self/exe"); err == nil {
			i.program = filepath.Join(filepath.Dir(self), "ingress")
		}
	}
	return i
}
