// Package tuning holds tables that say which form of a collective is the fastest: by collective, number of ranks, dtype and size of the message. Such a table
// was measured on one kind of device, by the command symmem tune, or estimated; tables of some GPUs come with this package. Package kernels looks a
// form up wherever it is left to it (kernels.Auto and the families).
//
// A table is data: a JSON file that people can read and change. [Read] refuses whatever it does not know.
package tuning
