// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/hostimage"
	"opensandbox.io/node/launch"
	"opensandbox.io/node/record"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Daemon is sandboxd at work.
type Daemon struct {
	config   Config
	lock     *os.File
	log      *slog.Logger
	instance string
	bootID   string
	rootless bool
	missing  []string

	runDir, files, spools, images string
	// group is who may connect to sockets.
	group   int
	tree    string
	cgroups *cgroup.Host
	blocks  *launch.Blocks
	own     *launch.Block
	host    *launch.Host
	records record.Dir
	image   image
	// base is what sandboxes of the strict profile are made of; shells are those that wait.
	base   *launch.Base
	shells *pool
	trash  *trash
	// behind counts what is still being given back of sandboxes that have ended.
	behind sync.WaitGroup

	mu        sync.Mutex
	sandboxes map[string]*sandbox
	// turns bounds the creates under way.
	turns    chan struct{}
	watchers *watchers
	life     *life
	ingress  *ingress
}

// image is the one image there is: a skeleton of this host.
type image struct{ dir, digest string }

// ErrRunning says that another sandboxd has this state directory.
var ErrRunning = errors.New("another sandboxd runs on this state directory")

// Run is sandboxd's life: take the state directory, find what a predecessor left, serve, leave. uid is who started
// it; ready is called once when it serves, with the path of its socket.
func Run(config Config, uid int, log *slog.Logger, ready func(socket string)) error {
	unix.Umask(0o022)
	d := &Daemon{
		config: config, log: log, rootless: uid != 0, sandboxes: map[string]*sandbox{},
		turns: make(chan struct{}, max(2, runtime.NumCPU())), watchers: newWatchers(), life: newLife(),
	}
	if err := os.MkdirAll(filepath.Join(config.StateDir, "log"), 0o755); err != nil {
		return err
	}
	lock, err := lockState(config.StateDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	d.lock = lock
	if err := d.settleIn(uid); err != nil {
		return err
	}
	defer d.moveOut()
	if err := d.adopt(); err != nil {
		return err
	}
	// Only now: what has no record was just swept away.
	d.shells = openPool(config.Shells, d.waitingShell, log)
	socket := filepath.Join(d.runDir, "sandboxd.sock")
	listener, err := d.listen(socket)
	if err != nil {
		return err
	}
	return d.serve(listener, func() { ready(socket) })
}

// lockState makes this the only sandboxd of its state directory. It waits a moment: a predecessor that is leaving or
// was killed lets go of the lock with its last thread.
func lockState(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, "sandboxd.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(time.Second); ; time.Sleep(10 * time.Millisecond) {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			break
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		holder := make([]byte, 32)
		n, _ := lock.ReadAt(holder, 0)
		err = fmt.Errorf("%w: process %s", ErrRunning, holder[:n])
	}
	if err == nil {
		err = lock.Truncate(0)
	}
	if err == nil {
		_, err = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err != nil {
		lock.Close()
		return nil, err
	}
	return lock, nil
}

// settleIn makes ready what the daemon and all its sandboxes share.
func (d *Daemon) settleIn(uid int) (err error) {
	if d.instance, err = instance(d.config.StateDir); err != nil {
		return err
	}
	if d.bootID, err = launch.BootID(); err != nil {
		return err
	}
	name := d.instance[:8]
	d.runDir = d.config.RunDir
	if d.runDir == "" {
		base := runBase(uid)
		if err := ownDirectory(base, uid); err != nil {
			return err
		}
		d.runDir = filepath.Join(base, name)
	}
	if err := socketPath(filepath.Join(d.runDir, "00000000-0000-0000-0000-000000000000", "ports")); err != nil {
		return err
	}
	blocksDir := d.config.BlocksDir
	if blocksDir == "" {
		// Wherever the sockets are: two instances of a host must never use the same ids. A user who has only one id
		// counts slots with it.
		blocksDir = filepath.Join(runBase(0), "blocks")
		if d.rootless {
			blocksDir = filepath.Join(filepath.Dir(d.runDir), "blocks")
		}
	}
	// What lies above must be passable for ingress, which has an id of its own.
	if err := os.MkdirAll(filepath.Dir(d.runDir), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(d.runDir, 0o750); err != nil {
		return err
	}
	if d.blocks, err = launch.OpenBlocks(blocksDir); err != nil {
		return err
	}
	if err := slim(ways(&d.config, d.runDir, blocksDir)); err != nil {
		if d.rootless && errors.Is(err, os.ErrPermission) {
			return noUserNamespace(err) // one was made, but it is worth nothing: AppArmor does that
		}
		return err
	}
	if err := d.ownIDs(); err != nil {
		return err
	}
	if err := d.directories(); err != nil {
		return err
	}
	d.tree = "opensandbox-" + name
	if d.cgroups, err = cgroup.Detect(); err != nil {
		return err
	}
	d.missing = missingRights(d.cgroups, d.rootless)
	d.host = &launch.Host{
		Rootless: d.rootless, Blocks: d.blocks, Cgroups: d.cgroups, Tree: d.tree,
		Files: d.files, Spools: d.spools, Run: d.runDir, Records: d.records, Group: d.group,
	}
	if err := d.host.Prepare(); err != nil {
		return err
	}
	id := 0
	if !d.rootless {
		id = d.own.UID()
	}
	d.ingress = newIngress(&d.config, d.runDir, id, d.log)
	return d.buildImage()
}

// ownIDs claims the instance's own uid block: ingress runs under it, and its group may use the sockets. The number
// is kept, so that it usually stays the same.
func (d *Daemon) ownIDs() error {
	kept := filepath.Join(d.config.StateDir, "sandboxd.json")
	var last struct{ Block *int }
	if text, err := os.ReadFile(kept); err == nil && json.Unmarshal(text, &last) == nil && last.Block != nil {
		var err error
		if d.own, err = d.blocks.ClaimAt(*last.Block); err != nil {
			return err
		}
	}
	if d.own == nil {
		var err error
		if d.own, err = d.blocks.Claim(); err != nil {
			return err
		}
	}
	text, err := json.Marshal(map[string]int{"block": d.own.N})
	if err != nil {
		return err
	}
	if !d.rootless {
		d.group = d.own.UID()
	}
	return os.WriteFile(kept, append(text, '\n'), 0o644)
}

func (d *Daemon) directories() (err error) {
	if err := errors.Join(os.Chown(d.runDir, -1, d.group), os.Chmod(d.runDir, 0o750)); err != nil {
		return err
	}
	base := filepath.Join(d.config.StateDir, "fs")
	if err := bindPlain(base); err != nil {
		return err
	}
	d.files, d.images = filepath.Join(base, "sandboxes"), filepath.Join(base, "images")
	d.spools = filepath.Join(d.config.StateDir, "spool")
	if d.records, err = record.Open(filepath.Join(d.config.StateDir, "records")); err != nil {
		return err
	}
	d.trash, err = openTrash(filepath.Join(base, "trash"), d.log)
	return err
}

// buildImage makes the skeleton of this host, or finds the one made before from the same files.
func (d *Daemon) buildImage() error {
	if err := os.MkdirAll(d.images, 0o700); err != nil {
		return err
	}
	digest, err := hostimage.Build(d.images, hostimage.Options{PipDir: d.config.PipDir})
	if err != nil {
		return fmt.Errorf("image host: %w", err)
	}
	d.image = image{dir: filepath.Join(d.images, digest), digest: digest}
	d.base = d.baseOf(string(wire.LaunchRequestProfileStrict))
	return nil
}

// listen binds the daemon's own socket. A file that is there already was left by a predecessor: the lock says that
// none lives.
func (d *Daemon) listen(socket string) (net.Listener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	// Not for the instance's group: ingress is in it, and ingress reads what hostile servers answer.
	return listener, os.Chmod(socket, 0o600)
}

func (d *Daemon) serve(listener net.Listener, ready func()) error {
	server := &http.Server{Handler: d.handler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelWarn)}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	// Taken and dropped, not ignored: what is ignored stays ignored in every program that is started from here.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGPIPE)
	go d.live()
	d.log.Info("serving", "instance", d.instance, "pid", os.Getpid(), "sandboxes", len(d.all()), "cgroup", d.cgroups.Version(), "rootless", d.rootless)
	ready()
	select {
	case err := <-failed:
		return err
	case s := <-signals:
		// Sandboxes live on; whoever comes next finds them.
		d.log.Info("leaving", "signal", s.String())
		d.life.leave()
	case <-d.life.leaving:
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(ctx)
}

// moveOut takes away what sandboxd made for itself. Where sandboxes live on, what they need stays.
func (d *Daemon) moveOut() {
	d.ingress.stop()
	if d.shells != nil {
		d.shells.close()
	}
	d.behind.Wait()
	d.trash.close(10 * time.Second)
	d.host.Close()
	if d.living() == 0 {
		if err := d.cgroups.Leave(d.tree); err != nil {
			d.log.Warn("left behind", "what", "control groups", "error", err)
		}
		os.Remove(d.runDir) // only if it is empty
	}
	d.own.Release()
}

// Tell prints the one line that whoever started sandboxd waits for.
func Tell(out *os.File, err error, socket string) {
	line := map[string]any{"ready": true, "socket": socket}
	if err != nil {
		var fault *reply.Fault
		if !errors.As(err, &fault) {
			fault = reply.Errorf(wire.CodeNodeUnavailable, "sandboxd does not start: %v.", err).
				WithHint("Its log has more.")
		}
		hint := fault.Hint
		if hint == "" {
			hint = fault.Code.Hint()
		}
		line = map[string]any{"error": wire.NodeError{Code: string(fault.Code), Message: fault.Message, Hint: hint}}
	}
	json.NewEncoder(out).Encode(line)
	tellParent(err == nil)
}
