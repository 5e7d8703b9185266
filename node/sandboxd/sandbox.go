// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/hostimage"
	"opensandbox.io/node/launch"
	"opensandbox.io/node/record"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wipe"
	"opensandbox.io/node/wire"
)

// createTimeout bounds one create on a host that has stopped making progress.
const createTimeout = 30 * time.Second

// sandbox is one entry of the table: its record and, while it lives, what it holds.
type sandbox struct {
	mu     sync.Mutex
	record record.Record
	// state is what reports say; the record knows only what is worth keeping.
	state wire.ReportState
	// why is the reason sandboxd itself ends it for, if it does.
	why wire.NodeEndReason

	// cancel gives up a create that is under way; made is closed when it is over, either way.
	cancel context.CancelFunc
	made   chan struct{}
	// ended is closed when the process is gone and everything it held is given back.
	ended chan struct{}
	// gone is closed when nothing of it is left.
	gone     chan struct{}
	deleting sync.Once
	// remains is what a removal found last; it is complete when gone is closed.
	remains wire.Remains

	block   *launch.Block
	group   *cgroup.Group
	process *launch.Process
}

func newSandbox(r record.Record) *sandbox {
	return &sandbox{
		record: r, state: wire.ReportStateCreating, cancel: func() {},
		made: make(chan struct{}), ended: make(chan struct{}), gone: make(chan struct{}),
	}
}

// alive tells whether it has, or is getting, a process.
func (s *sandbox) alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state != wire.ReportStateEnded
}

func (d *Daemon) report(s *sandbox) wire.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := wire.Report{
		ID: s.record.ID, State: s.state, Image: s.record.Image, Entrypoint: s.record.Entrypoint,
		Generation: s.record.Generation, Protocol: s.record.Protocol, CreatedAt: s.record.CreatedAt,
		Deadline: s.record.Deadline, Isolation: s.record.Isolation, Timings: s.record.Timings,
		Warnings: s.record.Warnings, Acknowledged: s.record.Acknowledged,
	}
	switch s.state {
	case wire.ReportStateEnded:
		// On record it is earlier, but told only when what it held is given back and its output is in its last place.
		r.End = s.record.End
	case wire.ReportStateRunning:
		pid := s.record.PID
		r.PID = &pid
		r.APISocket = filepath.Join(d.runDir, r.ID, "api")
		r.PortsSocket = filepath.Join(d.runDir, r.ID, "ports")
	}
	return r
}

// create makes a sandbox: check, reserve, launch, put on record, commit. On failure nothing of it is left.
func (d *Daemon) create(ctx context.Context, p *plan) (wire.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	if err := d.checkSpace(); err != nil {
		return wire.Report{}, err
	}
	s := newSandbox(record.Record{
		ID: p.request.ID, Generation: p.request.Generation, Protocol: Protocol, Phase: record.Running,
		CreatedAt: time.Now().UTC(), Deadline: p.request.Deadline, BootID: d.bootID, CgroupTree: d.tree,
		Image: p.image, ImageDigest: d.image.digest, Entrypoint: p.request.Entrypoint,
		Warnings: hostimage.Warnings(p.request.Env),
	})
	s.cancel = cancel
	defer close(s.made)
	if !d.reserve(s) {
		return wire.Report{}, invalid("A sandbox with the id %s exists already.", p.request.ID)
	}
	launched := false
	defer func() {
		// Also after a panic: an entry that never ends could not be deleted, and would keep sandboxd from leaving.
		if !launched {
			d.records.Remove(s.record.ID)
			d.forget(s)
		}
	}()
	defer d.shells.begin(true)()
	// More creates at once than processors only make each of them slower.
	select {
	case d.turns <- struct{}{}:
		defer func() { <-d.turns }()
	case <-ctx.Done():
		return wire.Report{}, startError(ctx, ctx.Err())
	}
	if err := d.launch(ctx, s, p); err != nil {
		d.log.Warn("create failed", "sandbox", s.record.ID, "requestId", p.request.RequestID, "error", err)
		return wire.Report{}, startError(ctx, err)
	}
	launched = true
	return d.report(s), nil
}

// launch brings the sandbox up, or its end on record if its entry point was quick.
func (d *Daemon) launch(ctx context.Context, s *sandbox, p *plan) error {
	enforced := enforceable(d.cgroups, p.limits)
	shell, err := d.shell(ctx, p, enforced)
	if err != nil && !errors.Is(err, launch.ErrEnded) {
		return err
	}
	s.mu.Lock()
	s.block, s.group, s.process = shell.Block, shell.Group, shell.Process
	s.record.Slot, s.record.PID, s.record.StartTime = shell.Slot(), shell.Process.PID, shell.Process.StartTime
	s.record.Isolation = d.isolation(p, enforced, shell.Block)
	s.record.Timings = shell.Timings()
	kept := s.record
	s.mu.Unlock()
	if err != nil {
		return d.endedEarly(s)
	}
	// On record before it may outlive us: the other way round there could be a sandbox that nobody knows.
	if err := d.records.Create(&kept); err != nil {
		shell.Close()
		return fmt.Errorf("record: %w", err)
	}
	shell.Commit()
	s.mu.Lock()
	s.state = wire.ReportStateRunning
	s.mu.Unlock()
	go d.awaitEnd(s)
	return nil
}

// endedEarly handles a first process that ended before execd answered: a quick entry point, or a failure.
func (d *Daemon) endedEarly(s *sandbox) error {
	s.process.Wait()
	if d.records.End(s.record.ID) != nil {
		d.finish(s)
		return nil
	}
	last := d.records.LogTail(s.record.ID, 4<<10)
	d.giveBack(s)
	wipe.Tree(filepath.Join(d.spools, s.record.ID))
	d.log.Error("the first process ended without a word", "sandbox", s.record.ID, "log", last)
	return &launch.Failure{Step: "start", Message: "the sandbox's first process ended unexpectedly"}
}

// shell turns one that waits into the sandbox, or makes one where none does. With launch.ErrEnded it returns one too.
func (d *Daemon) shell(ctx context.Context, p *plan, limits cgroup.Limits) (*launch.Shell, error) {
	id, base, spec := p.request.ID, d.base, d.spec(p, limits)
	if p.profile != base.Profile {
		base = d.baseOf(p.profile)
	}
	if shell := d.shells.take(base); shell != nil {
		err := shell.Configure(ctx, spec)
		if !errors.Is(err, launch.ErrEnded) || d.records.End(id) != nil {
			return shell, err
		}
		// It was dying when it was taken, and never became this sandbox. Another one will.
		shell.Process.Wait()
		d.giveBack(&sandbox{record: record.Record{ID: id}, block: shell.Block, group: shell.Group, process: shell.Process})
		wipe.Tree(filepath.Join(d.spools, id))
		d.records.Remove(id)
	}
	shell, err := d.host.Shell(base, id, limits, nil)
	if err != nil {
		return nil, err
	}
	return shell, shell.Configure(ctx, spec)
}

// waitingShell makes one for nobody in particular: named like a sandbox without a record, so that it is swept like
// one, and with the limits that most ask for.
func (d *Daemon) waitingShell(giveWay func()) (*launch.Shell, *launch.Base, error) {
	if err := d.checkSpace(); err != nil {
		return nil, nil, err
	}
	base := d.base
	shell, err := d.host.Shell(base, newUUID(), enforceable(d.cgroups, defaultLimits), giveWay)
	return shell, base, err
}

// baseOf is what a sandbox of that profile is made of.
func (d *Daemon) baseOf(profile string) *launch.Base {
	base := &launch.Base{Image: d.image.dir, Own: []string{"/usr/local"}, Profile: profile}
	for _, dir := range hostimage.Binds() {
		base.Binds = append(base.Binds, launch.Bind{Source: dir, Target: dir})
	}
	return base
}

func (d *Daemon) spec(p *plan, limits cgroup.Limits) *launch.Spec {
	// Pages of /dev/shm count as the sandbox's memory; half of it is what a host gives as well.
	shm := p.limits.MemoryBytes / 2
	return &launch.Spec{
		ID: p.request.ID, Limits: limits, Env: p.env, Cwd: workDir, Entrypoint: p.request.Entrypoint,
		TokenSHA256: p.request.TokenSHA256, ShmBytes: shm,
	}
}

// workDir is where the entry point and commands of the image host start.
const workDir = "/workspace"

// startError says to the caller what a failed create is.
func startError(ctx context.Context, err error) error {
	var fault *reply.Fault
	var failure *launch.Failure
	var missing *cgroup.MissingController
	switch {
	case errors.As(err, &fault):
		return fault
	case errors.As(err, &failure) && failure.Code != "":
		return reply.Errorf(wire.Code(failure.Code), "%s", failure.Message)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return reply.Errorf(wire.CodeSandboxStartTimeout, "The sandbox was not ready within %v.", createTimeout)
	case errors.Is(ctx.Err(), context.Canceled):
		return reply.Errorf(wire.CodeSandboxStartFailed, "The create was given up by its caller or by a delete.")
	case errors.As(err, &missing):
		return reply.Errorf(wire.CodeNodeUnsupportedHost, "%s.", missing.Error())
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM):
		return reply.Errorf(wire.CodeNodeExhausted, "This host has no room for another sandbox: %v.", err)
	}
	return reply.Errorf(wire.CodeSandboxStartFailed, "The sandbox did not start: %v.", err)
}

// checkSpace refuses creates before a full disk hurts everybody on this host.
func (d *Daemon) checkSpace() error {
	free, err := d.freeSpace()
	if err != nil {
		return err
	}
	if free < d.config.FreeSpaceReserve {
		return reply.Errorf(wire.CodeNodeDiskReserve, "Only %d MiB are free below %s; %d MiB stay in reserve.",
			free>>20, d.config.StateDir, d.config.FreeSpaceReserve>>20)
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(d.config.StateDir, &stat); err != nil {
		return fmt.Errorf("statfs %s: %w", d.config.StateDir, err)
	}
	// Filesystems without a fixed number of inodes say 0 of 0.
	if stat.Files > 0 && stat.Ffree < inodeReserve {
		return reply.Errorf(wire.CodeNodeDiskReserve, "Only %d files more fit below %s.", stat.Ffree, d.config.StateDir).
			WithHint("Remove files that are no longer needed from that filesystem.")
	}
	return nil
}

// inodeReserve is how many files must still fit on the filesystem for another sandbox.
const inodeReserve = 10_000

func (d *Daemon) freeSpace() (int64, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(d.config.StateDir, &stat); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", d.config.StateDir, err)
	}
	return int64(stat.Bavail) * stat.Bsize, nil
}

// awaitEnd belongs to one living sandbox.
func (d *Daemon) awaitEnd(s *sandbox) {
	s.process.Wait()
	d.finish(s)
}

// finish puts the end on record, gives everything back, and tells whoever watches. The process is gone.
func (d *Daemon) finish(s *sandbox) {
	s.mu.Lock()
	end := d.judge(s)
	s.record.End = end
	deleting := s.record.Phase == record.Deleting
	if !deleting {
		s.record.Phase = record.Ended
	}
	kept := s.record
	s.mu.Unlock()
	// The record first: killed between here and the end of the cleaning, the next sandboxd takes it up. One that is
	// being deleted is on record as such, and nobody will ask how it ended.
	if !deleting {
		if err := d.records.Save(&kept); err != nil {
			d.log.Error("end not on record", "sandbox", kept.ID, "error", err)
		}
	}
	d.giveBack(s)
	if !deleting {
		if err := d.keepOutput(kept.ID); err != nil {
			d.log.Warn("output of the entry point is lost", "sandbox", kept.ID, "error", err)
		}
	}
	s.mu.Lock()
	s.state = wire.ReportStateEnded
	s.mu.Unlock()
	close(s.ended)
	d.log.Info("sandbox ended", "sandbox", kept.ID, "reason", string(end.Reason))
	if !deleting {
		report := d.report(s)
		d.watchers.tell(wire.Event{Type: wire.EventTypeEnded, Report: &report})
	}
	d.life.poke()
}

// judge decides how a sandbox ended: our own reason, what execd wrote, what the kernel counted, or nothing known.
func (d *Daemon) judge(s *sandbox) *wire.NodeEnd {
	var usage cgroup.Usage
	if s.group != nil {
		if meter, err := s.group.Meter(); err == nil {
			usage, _ = meter.Read()
			meter.Close()
		}
	}
	end := d.records.End(s.record.ID)
	switch {
	case s.why != "":
		end = &wire.NodeEnd{Reason: s.why}
	case end != nil:
		if end.Reason == wire.NodeEndReasonSignalled && end.Signal == "SIGKILL" && usage.OOMKills > 0 {
			end.Reason = wire.NodeEndReasonOutOfMemory
		}
	case s.record.BootID != d.bootID:
		end = &wire.NodeEnd{Reason: wire.NodeEndReasonHostRestarted, Message: "The host was restarted."}
	case usage.OOMKills > 0:
		end = &wire.NodeEnd{Reason: wire.NodeEndReasonOutOfMemory, Message: "The kernel ended it: out of memory."}
	default:
		end = &wire.NodeEnd{Reason: wire.NodeEndReasonLost, Message: "Its first process ended without saying why."}
	}
	if now := time.Now().UTC(); end.At.IsZero() || end.At.After(now) {
		end.At = now
	}
	if usage.MemoryPeak > 0 {
		end.PeakMemoryBytes = &usage.MemoryPeak
	}
	return end
}

// giveBack returns what a living sandbox held, after its process is gone: everything but its record and output.
func (d *Daemon) giveBack(s *sandbox) {
	id := s.record.ID
	warn := func(what string, err error) {
		if err != nil {
			d.log.Error("left behind", "sandbox", id, "what", what, "error", err)
		}
	}
	warn("sockets", wipe.Tree(filepath.Join(d.runDir, id)))
	warn("files", d.trash.take(filepath.Join(d.files, id)))
	if s.process != nil {
		s.process.Close()
	}
	// Nobody needs to wait for the kernel to take the groups down. The ids go back last: whoever has them next gets
	// groups of the same name.
	group, block := s.group, s.block
	d.behind.Go(func() {
		if group != nil {
			warn("control group", group.Remove())
		}
		if block != nil {
			block.Release()
		}
	})
}

// end kills a sandbox for a reason of ours.
func (d *Daemon) end(s *sandbox, why wire.NodeEndReason) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != wire.ReportStateRunning || s.why != "" {
		return
	}
	s.why = why
	if err := s.process.Kill(); err != nil {
		d.log.Error("kill", "sandbox", s.record.ID, "error", err)
	}
}

// remove ends a sandbox if it lives and forgets it. Whoever comes second waits for the first.
func (d *Daemon) remove(ctx context.Context, id string) error {
	s, err := d.get(id)
	if err != nil {
		return err
	}
	defer d.shells.begin(false)()
	// Not on this request's goroutine: a caller that goes away must not leave half of it standing.
	s.deleting.Do(func() { go d.removeNow(s) })
	select {
	case <-s.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *Daemon) removeNow(s *sandbox) {
	s.cancel()
	<-s.made
	select {
	case <-s.gone: // the create gave up and undid itself
		return
	default:
	}
	s.mu.Lock()
	// On record first, so that a removal that is interrupted is finished by the next sandboxd.
	s.record.Phase = record.Deleting
	kept := s.record
	s.mu.Unlock()
	if err := d.records.Save(&kept); err != nil {
		d.log.Error("removal not on record", "sandbox", kept.ID, "error", err)
	}
	d.end(s, wire.NodeEndReasonKilled)
	<-s.ended
	d.gather(s)
	d.wipe(s)
}

// wipe forgets a sandbox that has ended.
func (d *Daemon) wipe(s *sandbox) {
	id := s.record.ID
	if err := wipe.Tree(filepath.Join(d.spools, id)); err != nil {
		d.log.Error("left behind", "sandbox", id, "what", "output", "error", err)
	}
	if err := d.records.Remove(id); err != nil {
		d.log.Error("left behind", "sandbox", id, "what", "record", "error", err)
	}
	d.forget(s)
}

func (d *Daemon) get(id string) (*sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, notFound(id)
}

func notFound(id string) error {
	return reply.Errorf(wire.CodeSandboxNotFound, "No sandbox %q on this node.", short(id))
}

func (d *Daemon) reserve(s *sandbox) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sandboxes[s.record.ID] != nil {
		return false
	}
	d.sandboxes[s.record.ID] = s
	return true
}

func (d *Daemon) forget(s *sandbox) {
	d.mu.Lock()
	delete(d.sandboxes, s.record.ID)
	d.mu.Unlock()
	close(s.gone)
	d.life.poke()
}

// all is the table as it is now.
func (d *Daemon) all() []*sandbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := make([]*sandbox, 0, len(d.sandboxes))
	for _, s := range d.sandboxes {
		list = append(list, s)
	}
	return list
}
