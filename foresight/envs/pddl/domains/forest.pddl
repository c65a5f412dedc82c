; A hiker walks on flat ground and climbs hills; water cannot be left again. A marked trail leads to the goal.
(define (domain forest)
  (:requirements :strips :typing :negative-preconditions)
  (:types place - object)
  (:predicates
    (at ?p - place)
    (water ?p - place)
    (hill ?p - place)
    (goal ?p - place)
    (adjacent ?p - place ?q - place)
    (trail ?from - place ?to - place))
  (:action walk
    :parameters (?from - place ?to - place)
    :precondition (and (at ?from) (adjacent ?from ?to) (not (hill ?to)) (not (water ?from)))
    :effect (and (at ?to) (not (at ?from))))
  (:action climb
    :parameters (?from - place ?to - place)
    :precondition (and (at ?from) (adjacent ?from ?to) (hill ?to) (not (water ?from)))
    :effect (and (at ?to) (not (at ?from)))))
