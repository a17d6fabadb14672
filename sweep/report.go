package sweep

// Action says what was done with a file.
type Action string

// Actions.
const (
	Kept        Action = "kept"
	WouldRemove Action = "would-remove" // a dry run
	Removed     Action = "removed"      // by this sweep
	Failed      Action = "failed"
)

// Report is what a sweep found and did; the JSON of kvlift sweep.
type Report struct {
	Schema        int        `json:"schema"`
	Files         []File     `json:"files"`
	FreedBytes    uint64     `json:"freed_bytes"`
	NamelessBytes uint64     `json:"nameless_bytes"`
	Nameless      []Nameless `json:"nameless"`
}

// File is one file whose name is of a family's shape.
type File struct {
	Path           string   `json:"path"`
	Family         string   `json:"family"`
	Verdict        Verdict  `json:"verdict"`
	Evidence       []string `json:"evidence"`
	Owners         []Owner  `json:"owners"`
	SizeBytes      int64    `json:"size_bytes"`
	AllocatedBytes int64    `json:"allocated_bytes"` // memory, or disk: a region may be sparse
	AgeSeconds     float64  `json:"age_seconds"`     // since it was changed
	Action         Action   `json:"action"`
	Reason         string   `json:"reason"`

	otherUser bool
	links     uint64 // names of the file: another one keeps its memory
}

// OtherUser tells that nobody holds it, and that it stays because it belongs to a user whose files were not asked for.
func (f *File) OtherUser() bool { return f.otherUser }

// Owner is a process that is seen to hold a file.
type Owner struct {
	PID  int    `json:"pid"`
	Comm string `json:"comm"`
}

// Nameless is what a process holds of files without a name.
type Nameless struct {
	PID   int    `json:"pid"`
	Comm  string `json:"comm"`
	Bytes uint64 `json:"bytes"`
}

// Count is how many files have the verdict and the action; "" counts any.
func (r *Report) Count(v Verdict, a Action) int {
	n := 0
	for _, f := range r.Files {
		if (v == "" || f.Verdict == v) && (a == "" || f.Action == a) {
			n++
		}
	}
	return n
}
