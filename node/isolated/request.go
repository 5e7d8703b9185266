// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"opensandbox.io/node/account"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	overlaysMax = 16
	othersMax   = 32
	idleMax     = 366 * 24 * time.Hour
)

// plan is a checked request.
type plan struct {
	setup      setup
	request    *wire.CreateIsolatedSessionRequest // as it is echoed: with what was left to us
	lasting    []string                           // paths of the overlays that diff and commit show
	credential *syscall.Credential
	idle       time.Duration
	strict     bool
}

func invalid(format string, args ...any) *reply.Fault {
	return reply.Errorf(wire.CodeInvalidRequestBody, format, args...)
}

// check understands a request or says what is wrong with it.
func (a *API) check(body *wire.CreateIsolatedSessionRequest) (*plan, error) {
	p := &plan{request: body}
	switch body.Profile {
	case "":
		body.Profile = wire.CreateIsolatedSessionRequestProfileStrict
	case wire.CreateIsolatedSessionRequestProfileStrict, wire.CreateIsolatedSessionRequestProfileBalanced:
	default:
		return nil, invalid("profile must be strict or balanced, not %.64q.", body.Profile)
	}
	p.strict = body.Profile == wire.CreateIsolatedSessionRequestProfileStrict
	p.setup.PrivateTmp = p.strict
	if body.ShareNet == nil {
		shared := !p.strict
		body.ShareNet = &shared
	}
	p.setup.Network = !*body.ShareNet
	p.setup.Bytes = a.memory()
	if err := p.checkMounts(); err != nil {
		return nil, err
	}
	if err := p.checkUser(); err != nil {
		return nil, err
	}
	if e := body.EnvPassthrough; e != nil && e.Mode != "" && e.Mode != wire.IsolatedEnvironmentModeAllow && e.Mode != wire.IsolatedEnvironmentModeDeny {
		return nil, invalid("env_passthrough.mode must be allow or deny, not %.64q.", e.Mode)
	}
	if idle := body.IdleTimeoutSeconds; idle != nil {
		if *idle < 0 || *idle > int64(idleMax/time.Second) {
			return nil, invalid("idle_timeout_seconds must lie between 0 and %d.", int64(idleMax/time.Second))
		}
		p.idle = time.Duration(*idle) * time.Second
	}
	p.setup.Cwd = p.setup.Mounts[0].Path
	return p, nil
}

func (p *plan) checkMounts() error {
	body := p.request
	all := body.Overlays
	if w := body.Workspace; w != nil {
		if w.Mode == "" {
			w.Mode = wire.IsolatedWorkspaceModeRw
			if p.strict {
				w.Mode = wire.IsolatedWorkspaceModeOverlay
			}
		}
		all = append([]wire.IsolatedOverlay{{Path: w.Path, Mode: wire.IsolatedOverlayMode(w.Mode)}}, all...)
	}
	if len(all) == 0 {
		return invalid("Give a workspace or overlays.").WithHint(`For example {"workspace": {"path": "/workspace"}}.`)
	}
	if len(all) > overlaysMax {
		return invalid("There are %d overlays; at most %d are possible.", len(all), overlaysMax)
	}
	if len(body.ExtraWritable) > othersMax || len(body.Binds) > othersMax {
		return invalid("extra_writable and binds may have at most %d entries each.", othersMax)
	}
	seen := map[string]bool{}
	add := func(field, source, dest string, h how) error {
		for _, one := range []string{source, dest} {
			if err := checkPath(field, one); err != nil {
				return err
			}
		}
		if seen[dest] {
			return invalid("%s: the session would see two things at %s.", field, dest).WithHint("Name each path once.")
		}
		seen[dest] = true
		p.setup.Mounts = append(p.setup.Mounts, mount{source, dest, h})
		return nil
	}
	for i := range all {
		o := &all[i]
		field := fmt.Sprintf("overlays[%d]", i)
		if o.Mode == "" {
			o.Mode = wire.IsolatedOverlayModeOverlay
		}
		switch o.Mode {
		case wire.IsolatedOverlayModeOverlay:
			if o.Persist == nil || *o.Persist {
				p.lasting = append(p.lasting, o.Path)
			}
		case wire.IsolatedOverlayModeRw, wire.IsolatedOverlayModeRo:
			if o.Persist != nil {
				return invalid("%s: persist means nothing where mode is %s.", field, o.Mode).WithHint("Leave it out.")
			}
		default:
			return invalid("%s: mode must be rw, overlay or ro, not %.64q.", field, o.Mode)
		}
		if err := add(field, o.Path, o.Path, how(o.Mode)); err != nil {
			return err
		}
	}
	for _, path := range body.ExtraWritable {
		if err := add("extra_writable", path, path, readWrite); err != nil {
			return err
		}
	}
	for i := range body.Binds {
		b := &body.Binds[i]
		if b.Dest == "" {
			b.Dest = b.Source
		}
		h := readWrite
		if b.Readonly {
			h = readOnly
		}
		if err := add("binds", b.Source, b.Dest, h); err != nil {
			return err
		}
	}
	body.Overlays = all
	if len(all) > 1 {
		body.Workspace = nil // of sessions with one only
	} else if body.Workspace == nil {
		body.Workspace = &wire.IsolatedWorkspace{Path: all[0].Path, Mode: wire.IsolatedWorkspaceMode(all[0].Mode)}
	}
	return nil
}

// kept are made for each session; nothing of the sandbox is shown there.
var kept = []string{"/proc", "/sys", "/dev"}

func checkPath(field, given string) error {
	switch {
	case !strings.HasPrefix(given, "/"):
		return invalid("%s: %.200q is not absolute.", field, given)
	case strings.IndexByte(given, 0) >= 0:
		return invalid("%s: a path holds a NUL byte.", field)
	case len(given) >= 4096:
		return invalid("%s: a path is longer than 4095 bytes.", field)
	case path.Clean(given) != given:
		return invalid("%s: %.200q is not in its shortest form.", field, given).WithHint("Write %.200q.", path.Clean(given))
	case given == "/":
		return invalid("%s: the whole root cannot be given to a session.", field).WithHint("Name the directories that it needs.")
	}
	for _, own := range kept {
		if given == own || strings.HasPrefix(given, own+"/") {
			return invalid("%s: a session has its own %s.", field, own).WithHint("Leave it out.")
		}
	}
	return nil
}

func (p *plan) checkUser() error {
	body := p.request
	switch body.UIDMode {
	case "":
		body.UIDMode = wire.CreateIsolatedSessionRequestUIDModeSetpriv
	case wire.CreateIsolatedSessionRequestUIDModeSetpriv:
	case wire.CreateIsolatedSessionRequestUIDModeUserns:
		return invalid("uid_mode userns is not there.").
			WithHint("Leave uid_mode out: each session has a user namespace anyhow, in which users have the numbers they have in the sandbox.")
	default:
		return invalid("uid_mode must be setpriv, not %.64q.", body.UIDMode)
	}
	// Without a wish it is the daemon's own user, whose groups it keeps.
	c := &syscall.Credential{Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid()), NoSetGroups: true}
	if body.UID == nil && body.GID != nil {
		return invalid("gid needs a uid.")
	}
	if body.UID != nil {
		for name, id := range map[string]*int64{"uid": body.UID, "gid": body.GID} {
			if id != nil && (*id < 0 || *id >= 1<<32-1) {
				return invalid("%s must be between 0 and %d.", name, int64(1<<32-2))
			}
		}
		own := *c
		c.Uid, c.Gid = uint32(*body.UID), uint32(*body.UID)
		book := account.Read()
		if u, ok := book.User(c.Uid); ok {
			c.Gid, c.Groups = u.GID, book.Groups(u)
		}
		if body.GID != nil {
			c.Gid = uint32(*body.GID)
		}
		if !exists("/proc/self/uid_map", c.Uid) || !exists("/proc/self/gid_map", c.Gid) {
			return invalid("The sandbox has no user %d with the group %d.", c.Uid, c.Gid).
				WithHint("On this machine sandboxes may have one user only, or the number is too large; leave uid and gid out.")
		}
		if c.Uid != own.Uid || c.Gid != own.Gid {
			c.NoSetGroups = false
		} else {
			c.Groups = nil
		}
	}
	p.credential = c
	p.setup.UID, p.setup.GID = int(c.Uid), int(c.Gid)
	for _, g := range c.Groups {
		p.setup.Groups = append(p.setup.Groups, int(g))
	}
	uid, gid := int64(c.Uid), int64(c.Gid)
	body.UID, body.GID = &uid, &gid
	return nil
}

// exists tells whether an id is one of this user namespace.
func exists(path string, id uint32) bool {
	text, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		var first, outside, count uint64
		if _, err := fmt.Sscan(line, &first, &outside, &count); err == nil && uint64(id) >= first && uint64(id) < first+count {
			return true
		}
	}
	return false
}

// secretEnds are how names of variables end that hold secrets.
var secretEnds = []string{
	"TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "API_KEY", "APIKEY", "_KEY", "PRIVATE_KEY", "_AUTH", "_DSN",
}

func looksSecret(name string) bool {
	name = strings.ToUpper(name)
	return slices.ContainsFunc(secretEnds, func(end string) bool { return strings.HasSuffix(name, end) })
}

// always are variables without which a shell is of little use.
var always = []string{"PATH", "HOME", "LANG"}

// environment leaves out what the session is not to get.
func (p *plan) environment(env []string) []string {
	wish := p.request.EnvPassthrough
	if wish == nil {
		wish = &wire.IsolatedEnvironment{}
	}
	allows := wish.Mode == wire.IsolatedEnvironmentModeAllow
	return slices.DeleteFunc(slices.Clone(env), func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		named := slices.Contains(wish.Keys, name)
		switch {
		case allows:
			return !named && !slices.Contains(always, name)
		case named:
			return true
		}
		return p.strict && looksSecret(name)
	})
}
