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
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
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
	// id is the user and group it runs as; 0 keeps sandboxd's (rootless).
	id  int
	log *slog.Logger

	// setting lets one request at a time bind.
	setting sync.Mutex

	mu        sync.Mutex
	hosts     []string
	port      int
	listeners []*os.File
	process   *os.Process
	started   *sync.Cond
	stopped   bool
	done      chan struct{}
}

// backoff between two starts grows from the first to the second.
const (
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

// set starts it, or says where it already listens.
func (i *ingress) set(hosts []string, port int) (wire.Ingress, error) {
	i.setting.Lock()
	defer i.setting.Unlock()
	i.mu.Lock()
	running := i.listeners != nil
	i.mu.Unlock()
	if !running {
		if err := i.start(hosts, port); err != nil {
			return wire.Ingress{}, err
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for i.process == nil && !i.stopped {
		i.started.Wait()
	}
	if i.process == nil {
		return wire.Ingress{}, reply.Errorf(wire.CodeNodeUnavailable, "ingress is stopping.")
	}
	return wire.Ingress{Port: i.port, Hosts: i.hosts, PID: i.process.Pid}, nil
}

func (i *ingress) start(hosts []string, port int) error {
	program, err := openProgram(i.program)
	if err != nil {
		return reply.Errorf(wire.CodeNodeUnsupportedHost, "ingress cannot be started: %v.", err)
	}
	bound, listeners, chosen, err := i.bind(hosts, port)
	if err != nil {
		program.Close()
		return reply.Errorf(wire.CodeNodeUnavailable, "ingress cannot listen: %v.", err).
			WithHint("Give another port, or stop what holds it.")
	}
	if text, err := json.Marshal(map[string]int{"port": chosen}); err == nil {
		if err := os.WriteFile(i.kept, append(text, '\n'), 0o644); err != nil {
			i.log.Warn("the port of ingress is not kept", "error", err)
		}
	}
	i.mu.Lock()
	i.hosts, i.port, i.listeners = bound, chosen, listeners
	i.done = make(chan struct{})
	i.mu.Unlock()
	go i.supervise(program)
	return nil
}

// bind listens on the first port on which the first host can be had, and there on the other hosts that can.
func (i *ingress) bind(hosts []string, port int) ([]string, []*os.File, int, error) {
	var failed error
	for _, candidate := range i.candidates(port) {
		first, err := listen(hosts[0], candidate.port, candidate.patience)
		if err != nil {
			failed = err
			continue
		}
		bound, listeners := hosts[:1:1], []*os.File{first}
		chosen := candidate.port
		if chosen == 0 {
			chosen = portOf(first)
		}
		for _, host := range hosts[1:] {
			f, err := listen(host, chosen, 0)
			if err != nil {
				i.log.Warn("ingress does not listen everywhere", "host", host, "error", err)
				continue
			}
			bound, listeners = append(bound, host), append(listeners, f)
		}
		return bound, listeners, chosen, nil
	}
	return nil, nil, 0, failed
}

type candidate struct {
	port     int
	patience time.Duration
}

func (i *ingress) candidates(port int) []candidate {
	// A predecessor that was killed takes its ingress with it, but not in the same instant.
	const patience = 2 * time.Second
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
	pause := shortPause
	for {
		began := time.Now()
		process, err := i.spawn(program)
		i.mu.Lock()
		if i.stopped {
			i.mu.Unlock()
			if err == nil {
				process.Kill()
				process.Wait()
			}
			return
		}
		if err == nil {
			i.process = process
			i.started.Broadcast()
		}
		i.mu.Unlock()
		if err == nil {
			state, _ := process.Wait()
			i.mu.Lock()
			i.process = nil
			stopped := i.stopped
			i.mu.Unlock()
			if stopped {
				return
			}
			i.log.Error("ingress ended; starting it again", "state", fmt.Sprint(state))
		} else {
			i.log.Error("ingress does not start", "error", err)
		}
		if time.Since(began) > longPause {
			pause = shortPause
		}
		time.Sleep(pause)
		pause = min(2*pause, longPause)
	}
}

func (i *ingress) spawn(program *os.File) (*os.Process, error) {
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
	args := []string{"ingress", "--run-dir", i.runDir}
	files := []*os.File{null, log, log}
	for n, f := range i.listeners {
		args = append(args, "--listen-fd", strconv.Itoa(3+n))
		files = append(files, f)
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
	i.started.Broadcast()
	process, done := i.process, i.done
	i.mu.Unlock()
	if done == nil {
		return
	}
	if process != nil {
		process.Kill()
	}
	<-done
	for _, f := range i.listeners {
		f.Close()
	}
}

func newIngress(config *Config, runDir string, id int, log *slog.Logger) *ingress {
	i := &ingress{
		program: config.Ingress, runDir: runDir, id: id, log: log,
		kept:    filepath.Join(config.StateDir, "ingress.json"),
		logFile: filepath.Join(config.StateDir, "log", "ingress.log"),
	}
	i.started = sync.NewCond(&i.mu)
	if i.program == "" {
		if self, err := os.Readlink("/proc/self/exe"); err == nil {
			i.program = filepath.Join(filepath.Dir(self), "ingress")
		}
	}
	return i
}
