// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/hostimage"
	"opensandbox.io/node/record"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// maxRequest bounds a request's body: entry point and environment, and some room for JSON's escapes.
const maxRequest = 8 << 20

// handler is the node API of spec/sandboxd.yaml.
func (d *Daemon) handler() http.Handler {
	mux := http.NewServeMux()
	route := func(pattern string, do func(w http.ResponseWriter, r *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := do(w, r); err != nil {
				reply.Error(w, r, err)
			}
		})
	}
	route("GET /version", d.getVersion)
	route("GET /host", d.getHost)
	route("POST /sandboxes", d.postSandbox)
	route("GET /sandboxes", d.listSandboxes)
	route("GET /sandboxes/{id}", d.getSandbox)
	route("DELETE /sandboxes/{id}", d.deleteSandbox)
	route("PUT /sandboxes/{id}/deadline", d.putDeadline)
	route("POST /sandboxes/{id}/acknowledge", d.postAcknowledge)
	route("GET /sandboxes/{id}/output", d.getOutput)
	route("GET /sandboxes/{id}/journal", d.getJournal)
	route("GET /events", d.watch)
	route("PUT /ingress", d.putIngress)
	route("POST /shutdown", d.postShutdown)
	route("/", func(http.ResponseWriter, *http.Request) error {
		return reply.Errorf(wire.CodeGeneralNotFound, "No such route; see spec/sandboxd.yaml.")
	})
	d.keepEnds()
	counted := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.life.begin()
		defer d.life.end()
		mux.ServeHTTP(w, r)
	})
	return reply.Handle(counted, d.log, wire.CodeSandboxInternalError)
}

func (d *Daemon) getVersion(w http.ResponseWriter, _ *http.Request) error {
	version := wire.NodeVersion{Protocol: Protocol, Version: d.config.Version, PID: os.Getpid(), Instance: d.instance, StateDir: d.config.StateDir}
	var stat unix.Stat_t
	if err := unix.Stat(d.config.StateDir, &stat); err == nil {
		device, inode := int64(stat.Dev), int64(stat.Ino)
		version.StateDevice, version.StateInode = &device, &inode
	}
	reply.JSON(w, http.StatusOK, version)
	return nil
}

func (d *Daemon) getHost(w http.ResponseWriter, _ *http.Request) error {
	free, err := d.freeSpace()
	if err != nil {
		return err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return err
	}
	shells := d.shells.size()
	reply.JSON(w, http.StatusOK, wire.Host{
		Shells:   &shells,
		Rootless: d.rootless, Kernel: unix.ByteSliceToString(name.Release[:]), Cgroup: wire.HostCgroup(d.cgroups.Version()),
		Images: hostimage.Aliases(), Missing: d.missing, FreeBytes: free, ReserveBytes: d.config.FreeSpaceReserve,
	})
	return nil
}

func (d *Daemon) postSandbox(w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		return invalid("The request could not be read, or is larger than %d bytes.", maxRequest)
	}
	request := new(wire.LaunchRequest)
	if fault := reply.DecodeReader(bytes.NewReader(body), request, wire.CodeSandboxInvalidParameter); fault != nil {
		return fault
	}
	if err := refuseZeroLimits(body); err != nil {
		return err
	}
	if request.RequestID == "" {
		request.RequestID = reply.RequestID(r)
	}
	reply.Notable(r)
	reply.Note(r, slog.String("sandbox", short(request.ID)))
	p, err := check(request, time.Now())
	if err != nil {
		return err
	}
	if d.rootless && p.profile == string(wire.LaunchRequestProfileIsolated) {
		// See isolated.possible.
		return reply.Errorf(wire.CodeSandboxApiNotSupported, "Isolated runs are not possible here: sandboxd is rootless, and its sandboxes have one user.").
			WithHint("Run opensandbox-server as root, or create the sandbox without the extension bootstrap.execd.isolation.")
	}
	report, err := d.create(r.Context(), p)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusCreated, report)
	return nil
}

// refuseZeroLimits tells a limit of zero, which is absurd, from one that is absent, which means the default: the
// generated type cannot.
func refuseZeroLimits(body []byte) error {
	var request struct {
		Limits map[string]json.Number `json:"limits"`
	}
	if json.Unmarshal(body, &request) != nil {
		return nil // the strict reading says it better
	}
	for name, value := range request.Limits {
		if value == "0" {
			return invalid("limits.%s must not be 0; leave it out for the default.", name)
		}
	}
	return nil
}

func (d *Daemon) listSandboxes(w http.ResponseWriter, _ *http.Request) error {
	list := wire.ReportList{Items: []wire.Report{}}
	for _, s := range d.all() {
		list.Items = append(list.Items, d.report(s))
	}
	slices.SortFunc(list.Items, func(a, b wire.Report) int { return strings.Compare(a.ID, b.ID) })
	reply.JSON(w, http.StatusOK, list)
	return nil
}

func (d *Daemon) getSandbox(w http.ResponseWriter, r *http.Request) error {
	s, err := d.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, d.report(s))
	return nil
}

func (d *Daemon) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	reply.Notable(r)
	reply.Note(r, slog.String("sandbox", short(r.PathValue("id"))))
	s, err := d.get(r.PathValue("id"))
	if err == nil {
		err = d.remove(r.Context(), s.record.ID)
	}
	if err != nil {
		return err
	}
	d.ingress.forgetEnd(s.record.ID)
	if r.URL.Query().Get("remains") != "true" {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	reply.JSON(w, http.StatusOK, s.remains)
	return nil
}

func (d *Daemon) putDeadline(w http.ResponseWriter, r *http.Request) error {
	var request wire.DeadlineRequest
	if err := reply.Decode(w, r, &request, maxRequest, wire.CodeSandboxInvalidParameter); err != nil {
		return err
	}
	err := d.change(r.PathValue("id"), func(s *sandbox) error {
		if s.state == wire.ReportStateEnded {
			return reply.Errorf(wire.CodeSandboxNotRunning, "The sandbox has ended.")
		}
		s.record.Deadline = request.Deadline
		return nil
	})
	if err != nil {
		return err
	}
	d.life.poke()
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *Daemon) postAcknowledge(w http.ResponseWriter, r *http.Request) error {
	err := d.change(r.PathValue("id"), func(s *sandbox) error {
		if s.state != wire.ReportStateEnded {
			return reply.Errorf(wire.CodeSandboxInvalidParameter, "The sandbox has not ended; there is nothing to acknowledge.")
		}
		s.record.Acknowledged = true
		return nil
	})
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// change edits a sandbox and its record as one.
func (d *Daemon) change(id string, edit func(*sandbox) error) error {
	s, err := d.get(id)
	if err != nil {
		return err
	}
	<-s.made // before that there is no record to change
	s.mu.Lock()
	defer s.mu.Unlock()
	// What is being removed must not be written again.
	if s.record.Phase == record.Deleting {
		return notFound(id)
	}
	if err := edit(s); err != nil {
		return err
	}
	return d.records.Save(&s.record)
}

func (d *Daemon) getOutput(w http.ResponseWriter, r *http.Request) error {
	s, err := d.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	output, err := d.output(s)
	if err != nil {
		return err
	}
	writeBytes(w, output)
	return nil
}

// writeBytes answers with what came out of a sandbox: nobody is to guess what it is.
func writeBytes(w http.ResponseWriter, content []byte) {
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Write(content)
}

func (d *Daemon) postShutdown(w http.ResponseWriter, r *http.Request) error {
	var request wire.ShutdownRequest
	if err := reply.Decode(w, r, &request, maxRequest, wire.CodeSandboxInvalidParameter); err != nil {
		return err
	}
	switch request.When {
	case wire.ShutdownRequestWhenIdle:
		if n := d.living(); n > 0 {
			return reply.Errorf(wire.CodeNodeBusy, "%d sandboxes live.", n)
		}
	case wire.ShutdownRequestWhenAll:
		if err := d.endAll(r.Context()); err != nil {
			return err
		}
	default:
		return invalid("when must be idle or all, not %q.", short(string(request.When)))
	}
	w.WriteHeader(http.StatusAccepted)
	d.life.leave()
	return nil
}
